/* Vectors: the instruction set that is used, conversions, lane permutations and sums over lanes.

   This file and `tiles.h` have the only code for one instruction set; another one is added here. Types: vi, vf: LANES
   numbers of 32 bits. vb: LANES channels with 4 columns each, as bytes. Inputs: one part of the inputs of a group of
   columns, of one row; the two parts are their high and low bytes or, with WORDS, those of even and of odd columns in
   16 bits. dot4(acc, w, x, step, part): acc + the sums of w * x over the 4 columns of a step, as far as the part has
   them.

   A lane permutation must be known at compile time: gcc builds another one at run time, 30 instructions, which
   doubled the time of rounding. So its indices are computed by macros from literals, and loops over widths are
   macros, too. */

#pragma once

#include "compiler.h"

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD) && !defined(PACELINE_PORTABLE)
#include <arm_neon.h>
#define NEON 1
#define ISA "neon dotprod"
#define LANES 4
#define ROWS 2 /* of inputs that are computed together */
#define SIGNED 1
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(PACELINE_PORTABLE)
#include <immintrin.h>
#define AVX512 1
#define ISA "avx512 vnni"
#define LANES 16
#define ROWS 4
#define SIGNED 0 /* vpdpbusd multiplies unsigned weights by signed inputs */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(PACELINE_PORTABLE)
#include <immintrin.h>
#define AVX2 1
#define ISA "avx2"
#define LANES 8
#define ROWS 2
#define SIGNED 1
#define WORDS 1 /* AVX2 has no dot product of bytes that does not saturate */
#else
#define ISA "portable" /* tests set LANES, SIGNED and WORDS, to have the layout of any CPU */
#ifndef LANES
#define LANES 4
#define SIGNED 1
#endif
#define ROWS 2
#endif
#ifndef WORDS
#define WORDS 0
#endif

#define VECS 2              /* vectors of channels that are computed together */
#define TILE (VECS * LANES) /* channels whose weights are stored together */

typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint8_t vb __attribute__((vector_size(LANES * 4)));
typedef int8_t vs __attribute__((vector_size(LANES)));

INLINE vb load_bytes(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }

#if NEON
typedef struct { int8x16_t halves[2]; } Inputs;
INLINE Inputs load_inputs(const int8_t *x) { return (Inputs){{vld1q_s8(x), vld1q_s8(x + 16)}}; }
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    int32x4_t a = (int32x4_t)acc;
    int8x16_t b = (int8x16_t)w, half = x.halves[step / 4];
    switch (step % 4) { /* the lane must be a constant */
    case 0: return (vi)vdotq_laneq_s32(a, b, half, 0);
    case 1: return (vi)vdotq_laneq_s32(a, b, half, 1);
    case 2: return (vi)vdotq_laneq_s32(a, b, half, 2);
    default: return (vi)vdotq_laneq_s32(a, b, half, 3);
    }
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf to_float(vi a) { return (vf)vcvtq_f32_s32((int32x4_t)a); }
INLINE vf load_float16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
typedef const int8_t *Inputs;
INLINE Inputs load_inputs(const int8_t *x) { return x; }
#if AVX512
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    int32_t four;
    memcpy(&four, x + 4 * step, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf to_float(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
INLINE vf load_float16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#elif AVX2
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    int32_t two;
    memcpy(&two, x + 4 * step, 4);
    __m256i odd = _mm256_srai_epi16((__m256i)w, 8), even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8);
    return acc + (vi)_mm256_madd_epi16(part ? odd : even, _mm256_set1_epi32(two));
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf to_float(vi a) { return (vf)_mm256_cvtepi32_ps((__m256i)a); }
INLINE vf load_float16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#else
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    for (int i = 0; i < LANES; i++)
        for (int j = WORDS * part; j < 4; j += 1 + WORDS) {
            int weight = SIGNED ? (int8_t)w[4 * i + j] : w[4 * i + j];
            acc[i] += weight * (WORDS ? ((const int16_t *)x)[2 * step + j / 2] : x[4 * step + j]);
        }
    return acc;
}
INLINE vf fma_(vf a, vf b, vf c) { return a * b + c; }
INLINE vf to_float(vi a) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = (float)a[i];
    return v;
}
INLINE float float16_to_float(uint16_t h) {
    uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 0x1p-24f;
    } else {
        bits = exponent == 31 ? 0x7f800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
        memcpy(&value, &bits, 4);
    }
    return h >> 15 ? -value : value;
}
INLINE vf load_float16(const uint16_t *p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = float16_to_float(p[i]);
    return v;
}
#endif
#endif

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* exp(x) for x <= 88; 0 below -87. NaN stays NaN. */
INLINE vf exp_(vf x) {
    vi tiny = x < splat(-87.0f);
    vf low = choose(tiny, splat(-87.0f), x);
    vf shifted = fma_(low, splat(1.44269504f), splat(12582912.0f)); /* its last bits are the nearest integer */
    vf n = shifted - splat(12582912.0f);
    vf r = fma_(n, splat(2.12194440e-4f), fma_(n, splat(-0.693359375f), low));
    vf p = splat(1.0f / 720);
    p = fma_(p, r, splat(1.0f / 120));
    p = fma_(p, r, splat(1.0f / 24));
    p = fma_(p, r, splat(1.0f / 6));
    p = fma_(p, r, splat(0.5f));
    p = fma_(p, r, splat(1.0f));
    p = fma_(p, r, splat(1.0f));
    vf scale = (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
    return choose(tiny, splat(0.0f), p * scale);
}

/* The first `count` of LANES numbers, then zeros. */
INLINE vf load_first(const float *p, int64_t count) {
    if (count >= LANES) return load(p);
    vf v = {0};
    if (count > 0) memcpy(&v, p, count * sizeof(float));
    return v;
}

INLINE void store_first(float *p, vf v, int64_t count) {
    if (count >= LANES) store(p, v);
    else if (count > 0) memcpy(p, &v, count * sizeof(float));
}

/* 2 * LANES numbers in bfloat16, with zeros after `count`: the even ones are the lower 16 bits of each lane, the odd
   ones the upper. */
INLINE vi load_bfloat16(const uint16_t *p, int64_t count) {
    vi v;
    if (__builtin_expect(count >= 2 * LANES, 1)) {
        memcpy(&v, p, sizeof v);
        return v;
    }
    vi some = {0};
    memcpy(&some, p, count * sizeof(uint16_t));
    return some;
}
INLINE vf even_of(vi pairs) { return (vf)(pairs << 16); }
INLINE vf odd_of(vi pairs) { return (vf)(pairs & (int32_t)0xffff0000); }

/* The nearest bfloat16, in the upper 16 bits. NaN stays NaN. */
INLINE uint32_t bfloat16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
}
INLINE void to_bfloat16(const float *x, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = bfloat16_bits(x[i]) >> 16;
}

/* EACH_LANE(index, width): index(0, width), index(1, width) and so on, for all lanes.
   EACH_WIDTH(step, ...): step(1, ...) step(2, ...) and so on, for the powers of two below LANES. */
#define FOUR_LANES(index, l, width) index(l, width), index(l + 1, width), index(l + 2, width), index(l + 3, width)
#define EIGHT_LANES(index, l, width) FOUR_LANES(index, l, width), FOUR_LANES(index, l + 4, width)
#if LANES == 16
#define EACH_LANE(index, width) EIGHT_LANES(index, 0, width), EIGHT_LANES(index, 8, width)
#define EACH_WIDTH(step, ...) step(1, __VA_ARGS__) step(2, __VA_ARGS__) step(4, __VA_ARGS__) step(8, __VA_ARGS__)
#elif LANES == 8
#define EACH_LANE(index, width) EIGHT_LANES(index, 0, width)
#define EACH_WIDTH(step, ...) step(1, __VA_ARGS__) step(2, __VA_ARGS__) step(4, __VA_ARGS__)
#else
#define EACH_LANE(index, width) FOUR_LANES(index, 0, width)
#define EACH_WIDTH(step, ...) step(1, __VA_ARGS__) step(2, __VA_ARGS__)
#endif

/* Lane l of the result is lane index(l, width) of a, then of b: b begins at LANES. gcc has had the first form for
   longer than the second, which is clang's only one. */
#ifdef __clang__
#define FROM(a, b, index, width) __builtin_shufflevector(a, b, EACH_LANE(index, width))
#else
#define FROM(a, b, index, width) __builtin_shuffle(a, b, (vi){EACH_LANE(index, width)})
#endif
#define EVEN_LANE(l, width) (2 * (l))
#define ODD_LANE(l, width) (2 * (l) + 1)
#define ALTERNATING(l, first) (((l) + (first)) / 2 + (l) % 2 * LANES) /* first: 0, or LANES: of the second half */
#define EXCHANGED(l, width) ((l) ^ (width))
#define LOWER_LANE(l, width) ((l) + ((l) & (width) ? LANES - (width) : 0))
#define UPPER_LANE(l, width) (LOWER_LANE(l, width) + (width))
/* Where l & width is set, lane l - width of b, otherwise lane l of a; and the rest of both, in the same places. */
#define LOWER(a, b, width) FROM(a, b, LOWER_LANE, width)
#define UPPER(a, b, width) FROM(a, b, UPPER_LANE, width)

/* Lane l: the sum of all lanes of v[l]. */
INLINE vf sum_lanes(vf v[LANES]) {
#define ADD_PAIRS(width, ...)                  \
    UNROLL(16)                                 \
    for (int i = 0; i < LANES; i += 2 * width) \
        v[i] = LOWER(v[i], v[i + width], width) + UPPER(v[i], v[i + width], width);
    EACH_WIDTH(ADD_PAIRS)
#undef ADD_PAIRS
    return v[0];
}

/* All lanes of v as one: `both` combines v and `other`, in which lanes have changed places. */
#define COMBINE(width, v, both)                             \
    {                                                       \
        __typeof__(v) other = FROM(v, v, EXCHANGED, width); \
        v = (both);                                         \
    }
#define REDUCE(v, both)          \
    EACH_WIDTH(COMBINE, v, both) \
    return v[0]

INLINE vi larger_int(vi a, vi b) { return (vi)choose(a > b, (vf)a, (vf)b); }
INLINE float largest_lane(vf v) { REDUCE(v, larger(other, v)); }
INLINE int32_t largest_int(vi v) { REDUCE(v, larger_int(other, v)); }
INLINE float lane_sum(vf v) { REDUCE(v, v + other); }
INLINE int32_t int_sum(vi v) { REDUCE(v, v + other); }
