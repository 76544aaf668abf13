"""Pictures of how a method works, for the documentation."""
