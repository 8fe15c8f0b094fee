"""A `Job` as plain JSON data and back."""
