"""What all schedulers have in common: submitting a run, and what goes on in its job."""
