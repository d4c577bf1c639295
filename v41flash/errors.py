"""The base of every error that is about what a user gave, not about this code."""


class InputError(ValueError):
    """A setting, file or flag that cannot be used.

    The text is one line that names it, its value and what would be right: programs print it and end
    with exit status 2. Any other exception is a fault of the code and keeps its traceback.
    """
