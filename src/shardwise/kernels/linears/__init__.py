"""Several linear layers of one input, after the norm of it: one launch where a few tokens stream the weights."""
