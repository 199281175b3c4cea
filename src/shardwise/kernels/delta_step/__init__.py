"""The gated delta rule and the gated norm of its output, as one operation."""
