"""The models by name (`registry`), those of ours (`built_in/`), and what they share."""
