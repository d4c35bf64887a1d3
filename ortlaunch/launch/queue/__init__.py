"""Code that all schedulers share: submitting a run, and running it inside its job."""
