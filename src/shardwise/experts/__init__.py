"""Experts that need not be on the GPU: banks in host memory, slots on the device, and what goes between them."""
