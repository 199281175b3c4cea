import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function


@constexpr_function
def mma(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@constexpr_function
def word_layout(BM, WORDS, RUN, UNDER, warps):
    """Words [BM, WORDS] (or [BM, WORDS // UNDER, UNDER], if UNDER) as a left operand's registers: RUN consecutive ones a thread."""
    def at(m, k):
        return [m, k // UNDER, k % UNDER] if UNDER else [m, k]
    def steps(first, stop):
        found = []
        while first < stop:
            found.append(first); first *= 2
        return found
    regs = [at(0, k) for k in steps(1, RUN)] + [at(8, 0), at(0, 4 * RUN)]
    regs += [at(0, k) for k in steps(8 * RUN, WORDS)] + [at(m, 0) for m in steps(16 * warps, BM)]
    lanes = [at(0, RUN), at(0, 2 * RUN), at(1, 0), at(2, 0), at(4, 0)]
    warp = [at(16 * b, 0) for b in steps(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [BM, WORDS // UNDER, UNDER] if UNDER else [BM, WORDS])

@constexpr_function
def scale_layout(wide):
    def cut(bases):
        return [b[:2] for b in bases]
    return gl.DistributedLinearLayout([b for b in cut(wide.reg_bases) if b[0] or b[1]], cut(wide.lane_bases), cut(wide.warp_bases), [], wide.shape[:2])

FP4_ASM = gl.constexpr("""{
.reg .b32 a, b, t;
and.b32 a, $4, 0x70007000; shr.u32 a, a, 6; lop3.b32 a, a, $4, 0x80008000, 0xF8; mul.rn.bf16x2 $3, a, $5;
shl.b32 t, $4, 4;
and.b32 b, t, 0x70007000; shr.u32 b, b, 6; lop3.b32 b, b, t, 0x80008000, 0xF8; mul.rn.bf16x2 $2, b, $5;
shl.b32 t, $4, 8;
and.b32 a, t, 0x70007000; shr.u32 a, a, 6; lop3.b32 a, a, t, 0x80008000, 0xF8; mul.rn.bf16x2 $1, a, $5;
shl.b32 t, $4, 12;
and.b32 b, t, 0x70007000; shr.u32 b, b, 6; lop3.b32 b, b, t, 0x80008000, 0xF8; mul.rn.bf16x2 $0, b, $5;
}""")

@gluon.jit
def halves(w):
    return gl.join((w & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True), (w >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True))

@gluon.jit
def weights(word, scale, A: gl.constexpr, WIDE: gl.constexpr, WORD: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr):
    small = (scale.to(gl.uint16) << 4).to(gl.bfloat16, bitcast=True)
    s = ((small * (2.0**120)).to(gl.bfloat16) * (2.0**119)).to(gl.bfloat16)
    s32 = s.to(gl.uint16, bitcast=True).to(gl.uint32)
    s32 = s32 | (s32 << 16)
    s32 = gl.convert_layout(s32, gl.SliceLayout(2, WIDE), assert_trivial=True)
    w3 = gl.convert_layout(gl.reshape(word, (BM, BK // 16, 2)), WIDE, assert_trivial=True)
    s3, w3 = gl.broadcast(gl.expand_dims(s32, 2), w3)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(FP4_ASM, "=r,=r,=r,=r,r,r", [w3, s3], dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32), is_pure=True, pack=1)
    v = gl.join(gl.join(halves(p0), halves(p2)), gl.join(halves(p1), halves(p3)))  # [.., half, p / 2, p % 2]
    v = gl.reshape(gl.permute(v, (0, 1, 2, 4, 5, 3)), (BM, BK))
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def gate_up_fp4(x, value, fine, act, order, starts_expert, starts_first, starts_stop, H: gl.constexpr, I: gl.constexpr, TOP_K: gl.constexpr,
                BI: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, KW: gl.constexpr, WARPS: gl.constexpr):
    """proto: one tile = expert, first, stop given by arrays"""
    TILES: gl.constexpr = I // BI
    M: gl.constexpr = mma(WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, M, KW)
    B: gl.constexpr = gl.DotOperandLayout(1, M, KW)
    WORD: gl.constexpr = word_layout(BI, BK // 8, KW // 8, 0, WARPS)
    WIDE: gl.constexpr = word_layout(BI, BK // 8, KW // 8, 2, WARPS)
    SHORT: gl.constexpr = scale_layout(WIDE)
    tile = gl.program_id(0) // TILES
    expert = gl.load(starts_expert + tile)
    first = gl.load(starts_first + tile)
    stop = gl.load(starts_stop + tile)
    if first < stop:
        i0 = gl.program_id(0) % TILES * BI
        t_T = gl.arange(0, BT, layout=gl.SliceLayout(0, B))
        ok_T = first + t_T < stop
        token_T = gl.load(order + first + t_T, mask=ok_T, other=0) // TOP_K
        k_K = gl.arange(0, BK, layout=gl.SliceLayout(1, B))
        x_at = (token_T.to(gl.int64) * H)[None, :] + k_K[:, None]
        okx = ok_T[None, :] & (k_K < BK)[:, None]
        i_C = i0 + gl.arange(0, BI, layout=gl.SliceLayout(1, WORD))
        c_C = gl.arange(0, BK // 8, layout=gl.SliceLayout(0, WORD))
        row = expert.to(gl.int64) * (2 * I)
        codes = value + row * (H // 8)
        at = (i_C * (H // 8))[:, None] + c_C[None, :]
        i_S = i0 + gl.arange(0, BI, layout=gl.SliceLayout(1, SHORT))
        g_S = gl.arange(0, BK // 16, layout=gl.SliceLayout(0, SHORT))
        s_at = (i_S * (H // 16))[:, None] + g_S[None, :]
        scales = fine + row * (H // 16)
        gate = gl.zeros((BI, BT), gl.float32, layout=M)
        up = gl.zeros((BI, BT), gl.float32, layout=M)
        g_c = gl.load(codes + at)
        u_c = gl.load(codes + (at + I * (H // 8)))
        g_s = gl.load(scales + s_at)
        u_s = gl.load(scales + (s_at + I * (H // 16)))
        for k0 in range(0, H, BK):
            x_KT = gl.load(x + (x_at + k0), mask=okx, other=0)
            x_KT = gl.reshape(gl.permute(gl.reshape(x_KT, (BK // 8, 2, 4, BT)), (0, 2, 1, 3)), (BK, BT))
            x_KT = gl.convert_layout(x_KT, B, assert_trivial=True)
            k1 = gl.minimum(k0 + BK, H - BK)
            g_n = gl.load(codes + (at + k1 // 8))
            u_n = gl.load(codes + (at + I * (H // 8) + k1 // 8))
            g_sn = gl.load(scales + (s_at + k1 // 16))
            u_sn = gl.load(scales + (s_at + I * (H // 16) + k1 // 16))
            gate = mma_v2(weights(g_c, g_s, A, WIDE, WORD, BI, BK), x_KT, gate)
            up = mma_v2(weights(u_c, u_s, A, WIDE, WORD, BI, BK), x_KT, up)
            g_c, u_c, g_s, u_s = g_n, u_n, g_sn, u_sn
        gate = gate * 128.0
        up = up * 128.0
        mixed = gate / (1.0 + gl.exp(-gate)) * up
        t_M = gl.arange(0, BT, layout=gl.SliceLayout(0, M))
        i_M = i0 + gl.arange(0, BI, layout=gl.SliceLayout(1, M))
        gl.store(act + (first + t_M)[None, :] * I + i_M[:, None], mixed.to(act.dtype.element_ty), mask=(first + t_M < stop)[None, :] & (i_M < I)[:, None])
