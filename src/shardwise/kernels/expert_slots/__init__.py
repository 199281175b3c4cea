"""A cache of experts on the device: which slots a step's experts are in, and copies of those that are in none."""
