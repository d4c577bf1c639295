"""Times forward + backward of the sibling DeepSeek-V4 in Hugging Face transformers (bf16, eager).

    python docs/results/rival_hf_deepseek_v4.py

The whole-step rival of configs/small.py: 12 layers (2 window, 10 compressed sparse), d 1024, 16
heads of 512, 32 experts top-4 of 512, 32 x 128 indexer, four residual streams, vocabulary 32768;
batch 1, no optimizer. Needs torch with CUDA and transformers >= 5.17.
"""

import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

LENGTHS = (4096, 8192)
REPEATS = 4


def main():
    """Prints one line per sequence length."""
    config = DeepseekV4Config(
        vocab_size=32768,
        hidden_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        head_dim=512,
        q_lora_rank=512,
        num_experts_per_tok=4,
        n_routed_experts=32,
        layer_types=["sliding_attention"] * 2 + ["compressed_sparse_attention"] * 10,
        mlp_layer_types=["moe"] * 12,
        o_groups=4,
        o_lora_rank=512,
        index_n_heads=32,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = DeepseekV4ForCausalLM(config).to(torch.bfloat16)
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}", flush=True)
    for length in LENGTHS:
        tokens = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(tokens, labels=tokens).loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
        peak = torch.cuda.max_memory_allocated() / 1e9
        best = sorted(times[1:])[len(times[1:]) // 2]
        print(f"T {length}: {best * 1e3:.0f} ms forward + backward, peak {peak:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
