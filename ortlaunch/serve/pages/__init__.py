"""The pages. A module here that has a `router` is part of the service."""
