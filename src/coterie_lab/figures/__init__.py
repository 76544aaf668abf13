"""Pictures for the documentation that show how a method works."""
