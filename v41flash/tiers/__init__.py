"""Where the state of prompts is kept: device pages, a pool on the host, a store on disk.

Bookkeeping and files alone, without JAX; `v41flash.serving.prefixes` moves the arrays.
"""
