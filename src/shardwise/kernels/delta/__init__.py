"""gated_delta: the gated delta rule of GatedDeltaNet, with its gating and normalisation, over a state kept per request.

`reference.gated_delta` is the definition; `triton.gated_delta` has the same signature.
"""
