"""The built-in models. The module NAME registers ``model=NAME``, and its builder imports torch or transformers."""
