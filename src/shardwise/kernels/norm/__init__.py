"""RMS norms: zero-centred, fused with the residual sum, and gated."""
