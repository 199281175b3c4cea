"""Codes of FP8 and NVFP4 to bf16, as instructions of NVIDIA's cards: what fragments.py makes its operands by."""

from triton.experimental.gluon import language as gl

# Two codes at a time to the places of sign, exponent and fraction of bf16; what the exponents' biases differ by goes
# into a factor. Products shift to the left, by the sum of two powers of two to two places at once, since the unit of
# logic has enough to do; -0.0 is added since sm_80 has fma of bf16, but no product.
E2M1 = gl.constexpr("""{
.reg .b32 a, b, c, d, v, z;
mov.b32 z, 0x80008000;
and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z;
and.b32 b, $4, 0x00F000F0; mul.lo.u32 b, b, 0x0104; and.b32 b, b, 0x81C081C0; fma.rn.bf16x2 $1, b, $5, z;
shr.u32 v, $4, 8;
and.b32 c, v, 0x000F000F; mul.lo.u32 c, c, 0x1040; and.b32 c, c, 0x81C081C0; fma.rn.bf16x2 $2, c, $5, z;
and.b32 d, v, 0x00F000F0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81C081C0; fma.rn.bf16x2 $3, d, $5, z;
}""")
# The same of words in the order of arrange.py.
E2M1_MOVED = gl.constexpr("""{
.reg .b32 a, b, c, d, t, u, z;
mov.b32 z, 0x80008000;
and.b32 a, $4, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z;
mul.lo.u32 b, $4, 8; and.b32 b, b, 0x81C081C0; fma.rn.bf16x2 $1, b, $5, z;
mul.lo.u32 c, $4, 64; mul.lo.u32 t, $4, 2;
and.b32 c, c, 0x01C001C0; lop3.b32 c, c, t, 0x80008000, 0xF8; fma.rn.bf16x2 $2, c, $5, z;
shr.u32 d, $4, 3; mul.lo.u32 u, $4, 4;
and.b32 d, d, 0x01C001C0; lop3.b32 d, d, u, 0x80008000, 0xF8; fma.rn.bf16x2 $3, d, $5, z;
}""")
E4M3 = gl.constexpr("""{
.reg .b32 a, b, s, f, z;
mov.b32 z, 0x80008000; mov.b32 f, 0x7B807B80;
shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, a, $2, 0x80008000, 0xF8; fma.rn.bf16x2 $1, a, f, z;
mul.lo.u32 b, $2, 16; mul.lo.u32 s, $2, 256;
and.b32 b, b, 0x07F007F0; lop3.b32 b, b, s, 0x80008000, 0xF8; fma.rn.bf16x2 $0, b, f, z;
}""")
# A positive e4m3 scale in both halves of a word, times 2 ** 119.
E4M3_SCALE = gl.constexpr("""{
.reg .b32 a, f, g, z;
mov.b32 z, 0x80008000; mov.b32 f, 0x7B807B80; mov.b32 g, 0x7B007B00;
mul.lo.u32 a, $1, 0x00100010; fma.rn.bf16x2 a, a, f, z; fma.rn.bf16x2 $0, a, g, z;
}""")
TIMES = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
