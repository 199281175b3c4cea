"""causal_conv: the short depthwise convolution before the delta rule, then SiLU, with its last inputs kept per request.

`reference.causal_conv` is the definition; `triton.causal_conv` has the same signature.
"""
