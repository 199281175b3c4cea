"""e4m3 by integer arithmetic, since not every card that is served has it in hardware. Bytes in, bytes out."""

import triton
import triton.language as tl


@triton.jit
def fp8_decode(code):
    """The values of e4m3 bytes, in fp16, which holds them all. NaN is not told apart: it is never stored."""
    wide = code.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half * 256.0  # the two exponents' biases differ by 8; a subnormal comes out right, too


@triton.jit
def fp8_encode(value):
    """The e4m3 bytes nearest to fp32 values, ties to even, clamped to the largest, 448."""
    bits = value.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(value), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # 2^23 * 1.5 leaves no bits for a fraction, so that adding it rounds; below 2^-6 steps are 2^-9 wide.
    small = (size * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) - 0x4B400000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
