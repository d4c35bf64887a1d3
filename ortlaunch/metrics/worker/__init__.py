"""What every worker measures at a log step: each module registers one function under its own name."""
