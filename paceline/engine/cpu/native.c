/* Forward passes with quantised weights on a CPU. `native.py` compiles this file for the machine it runs on.

   Weights stay in 4 or 8 bits: w = scale * q + offset, with one scale and one offset per group of 32 columns. The input
   of every matrix is rounded to 15 bits per group of 32, in two bytes, so that the sum of a group is one of integers
   and exact. This changes outputs no more than float32 itself does; 8 bits would change them visibly.

   Where the CPU multiplies tiles of bfloat16 numbers (AMX), it does so for the tokens of prompts, in matrices and in
   attention. Generated tokens, of which there are few at a time, are always computed as above.

   Sums are float32 and always in the same order: a token's result has the same bits whatever else is in the batch,
   however its prompt is cut into chunks, and wherever its pages are.

   The only code for one instruction set is in the sections "vectors" and "tiles". The reference implementation is
   `model/quantised.py` together with `model.decoder.Decoder`. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GROUP 32   /* columns with one scale */
#define LARGEST 16256 /* 127 * 128: an input after rounding */
#define STEPS 8    /* of 4 columns each, in a group */
#define KEYS 32    /* positions that attention reads at a time, from a multiple of it on */
#define CHUNK 64   /* positions whose attention is computed on its own, from a multiple of it on, and then merged */
#define QUERIES 8  /* tokens of one request whose attention is computed together */
#define TOGETHER (LANES < 16 ? 2 : 4) /* heads or tokens that read a key together: as many as the registers hold */
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64))) /* to a cache line: vectors that cross one take twice as long */

/* ---------------------------------------------------------------- threads

   The threads of a parallel region divide loops in parts of about the same size and wait for each other after each. In
   the long loops (`Loop`) a thread that is done takes over from one that is not, because another process has its core.

   They have a barrier of their own: that of libgomp hardly spins where a process has more OpenMP threads than cores,
   which another engine or torch in another thread is enough for, and a token passes 300 of them. */

#if defined(__x86_64__)
#define SPINS 4000 /* 0.2 ms: longer, and threads of a busy machine spin while others should run (docs/log/cpu.md) */
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define SPINS 20000
#define RELAX() __asm__ volatile("isb")
#else
#define SPINS 20000
#define RELAX() __asm__ volatile("")
#endif

typedef struct {
    int64_t taken; /* of a thread's part of the current loop */
} ALIGNED Taken;

typedef struct { /* shared by the threads of a region */
    Taken *parts;  /* by thread */
    int64_t spins; /* before a thread sleeps */
    int32_t arrived, phase, sleeping;
} ALIGNED Barrier;

/* As long as the threads of libgomp: by its environment variables, which users of a shared machine set. */
int64_t num_spins(void) {
    const char *count = getenv("GOMP_SPINCOUNT"), *policy = getenv("OMP_WAIT_POLICY");
    if (count && *count >= '0' && *count <= '9') {
        char *suffix;
        int64_t spins = strtoll(count, &suffix, 10);
        return *suffix == 'k' ? spins * 1000 : *suffix == 'M' ? spins * 1000000 : spins;
    }
    return policy && (*policy == 'p' || *policy == 'P') ? 0 : SPINS; /* passive */
}

typedef struct {
    int64_t index, count;
    Barrier *barrier;
} Thread;

typedef struct {
    int64_t first, end;
} Part;

/* This thread's part of a loop. */
INLINE Part part_of(const Thread *thread, int64_t count) {
    return (Part){count * thread->index / thread->count, count * (thread->index + 1) / thread->count};
}

typedef struct { /* a loop whose parts are not fixed */
    const Thread *thread;
    int64_t count, owner; /* owner: the thread from whose part is taken */
    Part part;
} Loop;

INLINE Loop loop_of(const Thread *thread, int64_t count) {
    return (Loop){thread, count, thread->index, part_of(thread, count)};
}

/* The next index of the loop for this thread: of its own part in order, then of others'. -1: there is none. */
INLINE int64_t take(Loop *loop) {
    for (;;) {
        int64_t *taken = &loop->thread->barrier->parts[loop->owner].taken;
        int64_t index = loop->part.first + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        if (index < loop->part.end) return index;
        Thread next = *loop->thread;
        next.index = loop->owner + 1 == next.count ? 0 : loop->owner + 1;
        if (next.index == loop->thread->index) return -1;
        loop->owner = next.index, loop->part = part_of(&next, loop->count);
    }
}

/* Waits until all threads have called it. The next loop begins. */
static void wait_for_all(const Thread *thread) {
    Barrier *b = thread->barrier;
    if (thread->count == 1) b->parts[0].taken = 0;
    if (thread->count == 1) return;
#ifdef _OPENMP
    int32_t phase = __atomic_load_n(&b->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == thread->count) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        for (int64_t i = 0; i < thread->count; i++) __atomic_store_n(&b->parts[i].taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&b->sleeping, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &b->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    for (int64_t i = 0; i < b->spins; i++) {
        if (__atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) != phase) return;
        RELAX();
    }
    __atomic_add_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&b->phase, __ATOMIC_SEQ_CST) == phase)
        syscall(SYS_futex, &b->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    __atomic_sub_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
#endif
}

INLINE Thread this_thread(Barrier *barrier) {
#ifdef _OPENMP
    return (Thread){omp_get_thread_num(), omp_get_num_threads(), barrier};
#else
    return (Thread){0, 1, barrier};
#endif
}

/* ---------------------------------------------------------------- vectors

   vb: LANES channels with 4 columns each, as bytes. Inputs: one part of those of a group of columns, of one row. The two
   parts are their high and low bytes. With WORDS they are the inputs of even and of odd columns, in 16 bits.
   dot4(acc, w, x, step, part): acc + the sums of w * x over the 4 columns of a step, as far as the part has them. */

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD) && !defined(PACELINE_PORTABLE)
#include <arm_neon.h>
#define ISA "neon dotprod"
#define LANES 4
#define ROWS 2
#define SIGNED 1
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(PACELINE_PORTABLE)
#include <immintrin.h>
#define ISA "avx512 vnni"
#define LANES 16
#define ROWS 4
#define SIGNED 0 /* vpdpbusd multiplies unsigned weights by signed inputs */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(PACELINE_PORTABLE)
#include <immintrin.h>
#define ISA "avx2"
#define LANES 8
#define ROWS 2
#define SIGNED 1
#define WORDS 1 /* it has no sums of products of bytes that do not saturate */
#else
#define ISA "portable" /* tests set the other two, to have the layout of any CPU */
#ifndef LANES
#define LANES 4
#define SIGNED 1
#endif
#define ROWS 2
#endif
#ifndef WORDS
#define WORDS 0
#endif

#define VECS 2                /* vectors of channels that are computed together */
#define TILE (VECS * LANES)   /* channels whose weights are stored together */

typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint8_t vb __attribute__((vector_size(LANES * 4)));
typedef int8_t vs __attribute__((vector_size(LANES)));

INLINE vb load_bytes(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD) && !defined(PACELINE_PORTABLE)
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
INLINE vf load_half(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
typedef const int8_t *Inputs;
INLINE Inputs load_inputs(const int8_t *x) { return x; }
#if LANES == 16 && !defined(PACELINE_PORTABLE)
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    int32_t four;
    memcpy(&four, x + 4 * step, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf to_float(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
INLINE vf load_half(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#elif LANES == 8 && !defined(PACELINE_PORTABLE)
INLINE vi dot4(vi acc, vb w, Inputs x, int step, int part) {
    int32_t two;
    memcpy(&two, x + 4 * step, 4);
    __m256i odd = _mm256_srai_epi16((__m256i)w, 8), even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8);
    return acc + (vi)_mm256_madd_epi16(part ? odd : even, _mm256_set1_epi32(two));
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf to_float(vi a) { return (vf)_mm256_cvtepi32_ps((__m256i)a); }
INLINE vf load_half(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
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
INLINE float half_to_float(uint16_t h) {
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
INLINE vf load_half(const uint16_t *p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
}
#endif
#endif

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* exp of x <= 88; 0 below -87. NaN stays NaN. */
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

/* The first of LANES numbers, then zeros. */
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

/* 2 * LANES numbers in bfloat16, zeros after `count`: their even ones are the lower halves, their odd ones the upper. */
INLINE vi load_halves(const uint16_t *p, int64_t count) {
    vi v;
    if (__builtin_expect(count >= 2 * LANES, 1)) {
        memcpy(&v, p, sizeof v);
        return v;
    }
    vi some = {0};
    memcpy(&some, p, count * sizeof(uint16_t));
    return some;
}
INLINE vf even_of(vi halves) { return (vf)(halves << 16); }
INLINE vf odd_of(vi halves) { return (vf)(halves & (int32_t)0xffff0000); }

/* The nearest bfloat16, in the upper 16 bits. NaN stays NaN. */
INLINE uint32_t rounded_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
}
INLINE void halve(const float *x, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = rounded_half(x[i]) >> 16;
}

#if LANES == 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANE_NUMBERS {0, 1, 2, 3}
#endif
/* Lane l of the result is lane `index` of a, then of b. index: of the vector l, so that it becomes one constant. */
#define FROM(a, b, index) ({ const vi l = LANE_NUMBERS; __builtin_shuffle(a, b, (vi)(index)); })
/* With l & width: lane l - width of b, otherwise lane l of a; and what is left of both, in the same places. */
#define LOWER(a, b, width) FROM(a, b, l + (((l & (width)) != 0) & (LANES - (width))))
#define UPPER(a, b, width) FROM(a, b, l + (width) + (((l & (width)) != 0) & (LANES - (width))))

/* Lane l: the sum of all lanes of v[l]. */
INLINE vf sum_lanes(vf v[LANES]) {
#pragma GCC unroll 4
    for (int width = 1; width < LANES; width *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * width)
            v[i] = LOWER(v[i], v[i + width], width) + UPPER(v[i], v[i + width], width);
    return v[0];
}

/* All lanes of v as one: `both` combines v and `other`, in which lanes have changed places. */
#define REDUCE(v, both)                                                \
    _Pragma("GCC unroll 4") for (int width = 1; width < LANES; width *= 2) { \
        __typeof__(v) other = FROM(v, v, l ^ width);                   \
        v = (both);                                                    \
    }                                                                  \
    return v[0]

INLINE vi larger_int(vi a, vi b) { return (vi)choose(a > b, (vf)a, (vf)b); }
INLINE float largest_lane(vf v) { REDUCE(v, larger(other, v)); }
INLINE int32_t largest_int(vi v) { REDUCE(v, larger_int(other, v)); }
INLINE float lane_sum(vf v) { REDUCE(v, v + other); }
INLINE int32_t int_sum(vi v) { REDUCE(v, v + other); }

/* ---------------------------------------------------------------- tiles

   A tile is a register of 16 rows with 64 bytes each. tile_dot(c, a, b): c[16 rows][16] += a[16 rows][32] times b, whose
   rows are pairs: [16][16 columns][2]. a and b are bfloat16, c is float32. There are 8; their numbers are literals. */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && LANES == 16 && !defined(PACELINE_PORTABLE)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_dot _tile_dpbf16ps

/* Whether the system lets this process use them. */
int32_t has_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* their data */) == 0; }

static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } ALIGNED config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" ::"m"(config) : "memory"); /* GCC 12 does not know that the next line reads it */
    _tile_loadconfig(&config);
}

static void end_tiles(void) { _tile_release(); }

INLINE vi pairs(vf low, vf high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vi)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

INLINE void store_halves(uint16_t *to, vf first, vf second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#elif defined(PACELINE_TILES) /* for tests: the same in plain C, with 16 lanes */
#define TILES 1
typedef union { float f[16][16]; uint16_t h[16][32]; uint8_t rows[16][64]; } Register;
static __thread Register registers[8];

int32_t has_tiles(void) { return 1; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
static void tile_zero(int t) { memset(registers + t, 0, sizeof registers[t]); }
static void tile_load(int t, const void *from, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy(registers[t].rows[i], (const uint8_t *)from + i * stride, 64);
}
static void tile_store(int t, void *to, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy((uint8_t *)to + i * stride, registers[t].rows[i], 64);
}
static float half_value(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static void tile_dot(int c, int a, int b) {
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 32; k++)
            for (int column = 0; column < 16; column++)
                registers[c].f[row][column] +=
                    half_value(registers[a].h[row][k]) * half_value(registers[b].h[k / 2][2 * column + k % 2]);
}

static vi pairs(vf low, vf high) {
    vi both;
    for (int l = 0; l < LANES; l++) both[l] = rounded_half(low[l]) >> 16 | (rounded_half(high[l]) & 0xffff0000);
    return both;
}
static void store_halves(uint16_t *to, vf first, vf second) {
    for (int l = 0; l < LANES; l++) to[l] = rounded_half(first[l]) >> 16, to[16 + l] = rounded_half(second[l]) >> 16;
}
#else
#define TILES 0
int32_t has_tiles(void) { return 0; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif

#if TILES
/* 16 rows of 16 numbers in place. */
INLINE void transpose_tile(vi rows[16]) {
#pragma GCC unroll 4
    for (int width = 1; width < 16; width *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & width) continue;
            vi a = rows[i], b = rows[i + width];
            rows[i] = LOWER(a, b, width);
            rows[i + width] = UPPER(a, b, width);
        }
}
#endif

/* ---------------------------------------------------------------- quantised matrices */

typedef struct {
    const uint8_t *data; /* see pack() */
    const float *bias;   /* or NULL */
    int32_t rows, columns, bits, unused;
} Matrix;

typedef struct { /* the rows of a batch, rounded to 15 bits: x = scale * (128 * high + low); WORDS: see "vectors" */
    int8_t *high, *low;
    float *scales, *sums; /* [rows, groups]; a sum is that of the rounded x, over a group */
    int64_t columns;      /* a multiple of GROUP: the rest is zero */
} Rounded;

INLINE int64_t groups_of(int64_t columns) { return (columns + GROUP - 1) / GROUP; }
INLINE int64_t block_bytes(int bits) { return TILE * 4 + TILE * GROUP * bits / 8; }

const char *isa(void) { return ISA; }

int64_t packed_bytes(int64_t rows, int64_t columns, int32_t bits) {
    return (rows + TILE - 1) / TILE * groups_of(columns) * block_bytes(bits);
}

static uint16_t to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);
    if (bits < 0x38800000) { /* subnormal: units of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return sign | (uint16_t)rintf(magnitude * 0x1p24f);
    }
    uint32_t rest = bits & 0x1fff, half = (bits - 0x38000000) >> 13;
    return sign | (half + (rest > 0x1000 || (rest == 0x1000 && (half & 1))));
}

/* Arranges a matrix by tiles of TILE rows (channels), in each by groups of columns. A block: the scales and the offsets
   of all channels as float16, then the values, by steps of 4 columns. Two steps of 4-bit values share their bytes.
   values[rows, columns]: 0 to 15, or with 8 bits -128 to 127. */
void pack(const int8_t *values, const float *scales, const float *offsets, int64_t rows, int64_t columns, int32_t bits,
          uint8_t *out) {
    int64_t groups = groups_of(columns);
    memset(out, 0, packed_bytes(rows, columns, bits));
    for (int64_t row = 0; row < rows; row++) {
        int64_t lane = row % TILE, vec = lane / LANES, in_vec = lane % LANES;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *block = out + (row / TILE * groups + g) * block_bytes(bits);
            uint16_t *halves = (uint16_t *)block;
            float scale = scales[row * groups + g], offset = offsets[row * groups + g];
            if (bits == 8 && !SIGNED) offset -= 128 * scale;
            halves[lane] = to_half(scale);
            halves[TILE + lane] = to_half(offset);
            uint8_t *packed = block + TILE * 4;
            for (int k = 0; k < GROUP; k++) {
                int64_t column = g * GROUP + k;
                int value = column < columns ? values[row * columns + column] : 0;
                int step = k / 4;
                if (bits == 4)
                    packed[((step / 2) * VECS + vec) * LANES * 4 + in_vec * 4 + k % 4] |= value << (step % 2 * 4);
                else
                    packed[(step * VECS + vec) * LANES * 4 + in_vec * 4 + k % 4] = SIGNED ? value : value + 128;
            }
        }
    }
}

#define SUM(r) (WORDS ? (r) % M : (r))

/* TILE channels of M rows of x. next: NULL, or bytes to prefetch meanwhile, `next_bytes` for each group. */
INLINE void tile_product(const uint8_t *tile, const Rounded *x, int64_t row, const int M, const int bits,
                         const uint8_t *next, int64_t next_bytes, vf out[ROWS][VECS]) {
    const int64_t groups = x->columns / GROUP;
    const int8_t *high = x->high + row * x->columns, *low = x->low + row * x->columns;
    const float *scales = x->scales + row * groups, *sums = x->sums + row * groups;
    vf total[ROWS][VECS];
    for (int r = 0; r < M; r++)
        for (int v = 0; v < VECS; v++) total[r][v] = (vf){0};
    for (int64_t g = 0; g < groups; g++, tile += block_bytes(bits), high += GROUP, low += GROUP) {
        if (next)
            for (const uint8_t *end = next + next_bytes; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        const uint8_t *w = tile + TILE * 4;
        Inputs inputs[2 * ROWS]; /* the high parts of all rows, then the low parts */
        vi acc[2 * ROWS][VECS];  /* with WORDS both parts of a row have one sum */
        for (int r = 0; r < M; r++) {
            inputs[r] = load_inputs(high + r * x->columns);
            inputs[M + r] = load_inputs(low + r * x->columns);
        }
        for (int r = 0; r < 2 * M; r++)
            for (int v = 0; v < VECS; v++) acc[r][v] = (vi){0};
#pragma GCC unroll 8
        for (int s = 0; s < STEPS; s += 8 / bits)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++, w += LANES * 4) {
                vb bytes = load_bytes(w), first = bits == 4 ? bytes & 15 : bytes;
#pragma GCC unroll 8
                for (int r = 0; r < 2 * M; r++)
                    acc[SUM(r)][v] = dot4(acc[SUM(r)][v], first, inputs[r], s, r >= M);
                if (bits == 8) continue;
#pragma GCC unroll 8
                for (int r = 0; r < 2 * M; r++)
                    acc[SUM(r)][v] = dot4(acc[SUM(r)][v], bytes >> 4, inputs[r], s + 1, r >= M);
            }
        const uint16_t *halves = (const uint16_t *)tile;
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            vf scale = load_half(halves + v * LANES), offset = load_half(halves + TILE + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < M; r++) {
                vf product = to_float(WORDS ? acc[r][v] : (acc[r][v] << 7) + acc[M + r][v]);
                total[r][v] = fma_(product, scale * splat(scales[r * groups + g]), total[r][v]);
                total[r][v] = fma_(offset, splat(sums[r * groups + g]), total[r][v]);
            }
        }
    }
    for (int r = 0; r < M; r++)
        for (int v = 0; v < VECS; v++) out[r][v] = total[r][v];
}

/* A tile of 4-bit values as one of 8-bit values, which are faster to read again and again. */
static void expand(const uint8_t *tile, int64_t groups, uint8_t *out) {
    for (int64_t g = 0; g < groups; g++, tile += block_bytes(4), out += block_bytes(8)) {
        memcpy(out, tile, TILE * 4);
        const uint8_t *packed = tile + TILE * 4;
        uint8_t *values = out + TILE * 4;
        for (int s = 0; s < STEPS; s += 2)
            for (int v = 0; v < VECS; v++, packed += LANES * 4) {
                vb bytes = load_bytes(packed), low = bytes & 15, high = bytes >> 4;
                memcpy(values + (s * VECS + v) * LANES * 4, &low, sizeof low);
                memcpy(values + ((s + 1) * VECS + v) * LANES * 4, &high, sizeof high);
            }
    }
}

/* Channels first to first + TILE - 1 of M rows of y = x W' + bias, or y + that. */
INLINE void product_rows(const Matrix *w, const uint8_t *tile, int64_t first, const Rounded *x, int64_t row,
                         const int M, const int bits, const uint8_t *next, float *y, int add) {
    vf out[ROWS][VECS];
    tile_product(tile, x, row, M, bits, next, block_bytes(w->bits), out);
    int64_t count = w->rows - first < TILE ? w->rows - first : TILE;
    for (int r = 0; r < M; r++) {
        float *target = y + (row + r) * w->rows + first;
        if (count == TILE) {
            for (int v = 0; v < VECS; v++) {
                vf value = out[r][v];
                if (w->bias) value += load(w->bias + first + v * LANES);
                if (add) value += load(target + v * LANES);
                store(target + v * LANES, value);
            }
        } else {
            float values[TILE];
            for (int v = 0; v < VECS; v++) store(values + v * LANES, out[r][v]);
            for (int64_t i = 0; i < count; i++) {
                float value = values[i];
                if (w->bias) value += w->bias[first + i];
                target[i] = add ? target[i] + value : value;
            }
        }
    }
}

INLINE int64_t tiles_of(const Matrix *w) { return (w->rows + TILE - 1) / TILE; }

/* Tile t of y[rows, w.rows] = x W' + bias, or y + that. */
static void product(const Matrix *w, int64_t t, const Rounded *x, int64_t rows, float *y, int add) {
    int64_t groups = x->columns / GROUP, row = 0;
    const uint8_t *tile = w->data + t * groups * block_bytes(w->bits);
    int expands = w->bits == 4 && rows >= 4 * ROWS;
    uint8_t expanded[expands ? groups * block_bytes(8) : 1];
    /* The next tile is read while the last rows of this one are computed, if that does not read this one. */
    const uint8_t *after = rows > ROWS && t + 1 < tiles_of(w) ? tile + groups * block_bytes(w->bits) : NULL;
#define NEXT(count) (row + (count) == rows ? after : NULL)
    if (expands) expand(tile, groups, expanded);
    if (w->bits == 4 && !expands) {
        for (; row + ROWS <= rows; row += ROWS) product_rows(w, tile, t * TILE, x, row, ROWS, 4, NEXT(ROWS), y, add);
        for (; row < rows; row++) product_rows(w, tile, t * TILE, x, row, 1, 4, NEXT(1), y, add);
    } else {
        if (expands) tile = expanded;
        for (; row + ROWS <= rows; row += ROWS) product_rows(w, tile, t * TILE, x, row, ROWS, 8, NEXT(ROWS), y, add);
        for (; row < rows; row++) product_rows(w, tile, t * TILE, x, row, 1, 8, NEXT(1), y, add);
    }
#undef NEXT
}

#if TILES
#define BLOCK 64 /* groups of columns whose weights are in bfloat16 at a time: 128 KB */
#define ROW_TILE(groups) ((groups) * 16 * GROUP)

/* Some groups of a row in bfloat16: by 16 rows, in these by groups. A group of 16 rows is the left operand of a product
   of tiles. */
static void halve_row(const float *x, int64_t columns, int64_t row, Part groups, uint16_t *to) {
    to += row / 16 * ROW_TILE(groups_of(columns)) + row % 16 * GROUP;
    for (int64_t g = groups.first, k = g * GROUP; g < groups.end; g++, k += GROUP)
        store_halves(to + g * 16 * GROUP, load_first(x + k, columns - k), load_first(x + k + LANES, columns - k - LANES));
}

/* `groups` of a tile of weights as right operands: [groups][VECS][16 pairs of columns][LANES channels][2]. */
INLINE void halve_weights(const uint8_t *tile, int64_t groups, const int bits, uint16_t *out) {
    for (int64_t g = 0; g < groups; g++, tile += block_bytes(bits))
        for (int v = 0; v < VECS; v++) {
            const uint16_t *halves = (const uint16_t *)tile;
            vf scale = load_half(halves + v * LANES), offset = load_half(halves + TILE + v * LANES);
#pragma GCC unroll 16
            for (int pair = 0; pair < GROUP / 2; pair++, out += 2 * LANES) {
                int step = pair / 2, shift = pair % 2 * 16 + (bits == 4 ? step % 2 * 4 : 0);
                vi bytes = (vi)load_bytes(tile + TILE * 4 + ((bits == 4 ? step / 2 : step) * VECS + v) * LANES * 4);
                vi low = bytes >> shift & ((1 << bits) - 1), high = bytes >> (shift + 8) & ((1 << bits) - 1);
                vi both = pairs(fma_(to_float(low), scale, offset), fma_(to_float(high), scale, offset));
                memcpy(out, &both, sizeof both);
            }
        }
}

/* to[16 M, TILE] = from + A B, of rows with these strides in bytes. */
INLINE void multiply_tiles(const uint16_t *a, int64_t row_tile, const uint16_t *b, int64_t groups, const int M,
                           const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    int64_t half = from_stride / (int64_t)sizeof(float) * 16, to_half = to_stride / (int64_t)sizeof(float) * 16;
    tile_load(0, from, from_stride);
    tile_load(1, from + 16, from_stride);
    if (M == 2) {
        tile_load(2, from + half, from_stride);
        tile_load(3, from + half + 16, from_stride);
    }
    for (int64_t g = 0; g < groups; g++, a += 16 * GROUP, b += TILE * GROUP) {
        tile_load(4, a, 64);
        tile_load(6, b, 64);
        tile_load(7, b + 16 * GROUP, 64);
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        if (M == 1) continue;
        tile_load(5, a + row_tile, 64);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tile_store(0, to, to_stride);
    tile_store(1, to + 16, to_stride);
    if (M == 2) {
        tile_store(2, to + to_half, to_stride);
        tile_store(3, to + to_half + 16, to_stride);
    }
}

/* As product(), with rows in bfloat16. */
static void halves_product(const Matrix *w, int64_t t, const uint16_t *x, int64_t rows, float *y, int add) {
    static const float zeros[TILE];
    int64_t groups = groups_of(w->columns), bytes = block_bytes(w->bits);
    int64_t first = t * TILE, channels = w->rows - first < TILE ? w->rows - first : TILE;
    uint16_t weights[BLOCK * TILE * GROUP] ALIGNED;
    float edge[2 * 16][TILE] ALIGNED;
    for (int64_t g = 0; g < groups; g += BLOCK) {
        int64_t num = groups - g < BLOCK ? groups - g : BLOCK;
        const uint8_t *data = w->data + (t * groups + g) * bytes;
        const float *bias = g == 0 ? w->bias : NULL;
        int adds = add || g > 0;
        if (w->bits == 4) halve_weights(data, num, 4, weights);
        else halve_weights(data, num, 8, weights);
        for (int64_t row = 0; row < rows; row += 32) {
            int64_t count = rows - row < 32 ? rows - row : 32;
            const uint16_t *a = x + row / 16 * ROW_TILE(groups) + g * 16 * GROUP;
            float *to = y + row * w->rows + first;
            const float *from = adds ? to : bias ? bias + first : zeros;
            int64_t stride = w->rows * sizeof(float), from_stride = adds ? stride : 0;
            int is_edge = channels < TILE || count % 16 || (adds && bias);
            if (is_edge) {
                for (int64_t r = 0; r < count; r++)
                    for (int64_t i = 0; i < channels; i++)
                        edge[r][i] = (adds ? to[r * w->rows + i] : 0) + (bias ? bias[first + i] : 0);
                from = edge[0], from_stride = sizeof edge[0];
            }
            float *target = is_edge ? edge[0] : to;
            int64_t target_stride = is_edge ? (int64_t)sizeof edge[0] : stride;
            if (count > 16)
                multiply_tiles(a, ROW_TILE(groups), weights, num, 2, from, from_stride, target, target_stride);
            else
                multiply_tiles(a, ROW_TILE(groups), weights, num, 1, from, from_stride, target, target_stride);
            if (is_edge)
                for (int64_t r = 0; r < count; r++) memcpy(to + r * w->rows, edge[r], channels * sizeof(float));
        }
    }
}
#endif

/* ---------------------------------------------------------------- rows */

/* Rounds some groups of one row. A value that is not finite makes all of its group NaN. */
static void round_row(const float *x, int64_t columns, const Rounded *to, int64_t row, Part groups) {
    int64_t at = row * to->columns, num_groups = to->columns / GROUP;
    for (int64_t g = groups.first; g < groups.end; g++) {
        vf values[GROUP / LANES];
        vi sizes = {0}, totals = {0};
        for (int v = 0; v < GROUP / LANES; v++) {
            int64_t first = g * GROUP + v * LANES;
            values[v] = load_first(x + first, columns - first);
            sizes = larger_int((vi)values[v] & 0x7fffffff, sizes); /* as integers they have the order of floats */
        }
        int32_t bits = largest_int(sizes), finite = bits < 0x7f800000;
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        float scale = finite ? largest / LARGEST : NAN;
        float inverse = finite && largest > 0 ? LARGEST / largest : 0;
        if (!(inverse <= FLT_MAX)) inverse = scale = 0; /* all values are subnormal */
        for (int v = 0; v < GROUP / LANES; v++) {
            int8_t *high = to->high + at + g * GROUP + v * LANES, *low = to->low + at + g * GROUP + v * LANES;
            vf value = finite ? values[v] * splat(inverse) : splat(0);
            vf half = choose(value < splat(0), splat(-0.5f), splat(0.5f));
            vi rounded = __builtin_convertvector(value + half, vi), upper = (rounded + 64) >> 7;
            totals += rounded;
            if (WORDS) {
                int16_t *even = (int16_t *)high, *odd = (int16_t *)low;
                for (int l = 0; l < LANES; l += 2) even[l / 2] = rounded[l], odd[l / 2] = rounded[l + 1];
                continue;
            }
            vs highs = __builtin_convertvector(upper, vs), lows = __builtin_convertvector(rounded - (upper << 7), vs);
            memcpy(high, &highs, sizeof highs);
            memcpy(low, &lows, sizeof lows);
        }
        to->scales[row * num_groups + g] = scale;
        to->sums[row * num_groups + g] = scale * (float)int_sum(totals);
    }
}

/* 1 / root mean square */
INLINE float inverse_rms(const float *x, int64_t count, float eps) {
    float lanes[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j] * x[i + j];
    for (int j = 0; j < 16; j++) total += lanes[j];
    for (; i < count; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)count + eps);
}

INLINE void norm_row(const float *x, const float *weight, int64_t count, float eps, float *out) {
    float factor = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * factor * weight[i];
}

INLINE void rotate(float *x, const float *cos_sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float real = x[i], imaginary = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = real * c - imaginary * s;
        x[half + i] = imaginary * c + real * s;
    }
}

/* In an order that depends on the count alone. */
INLINE float dot(const float *x, const float *y, int64_t count) {
    float lanes[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j] * y[i + j];
    for (int j = 0; j < 16; j++) total += lanes[j];
    for (; i < count; i++) total += x[i] * y[i];
    return total;
}

/* ---------------------------------------------------------------- the decoder */

enum { QKV, OUT, GATE_UP, DOWN, NUM_ADAPTED, MAX_RANK = 128 };

typedef struct { /* what an adapter adds to some outputs of a matrix: y[first ...] += b (a x) */
    const float *a, *b; /* [rank, columns], [rows, rank] */
    int64_t first, rows, rank;
} LowRank;

typedef struct { /* of one matrix */
    const LowRank *parts;
    int64_t num_parts;
} Adapter;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* or NULL */
    const float *qk_norm, *rope;                                                  /* or NULL */
    int64_t window;                                                               /* 0: all positions */
} Layer;

typedef struct {
    Matrix embedding;
    const Layer *layers;
    const float *norm;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn;
    float eps, scale, score_cap, embedding_scale; /* score_cap 0: none */
    int32_t activation;                           /* 0: silu, 1: gelu, tanh form */
    int32_t full_qk_norm;                         /* over all heads together */
} Model;

typedef struct { /* see engine/cpu/inputs.py */
    int64_t num_tokens, num_rows, page_size, num_pages; /* num_pages: columns of pages */
    int64_t num_decode_rows; /* the first ones; the tokens of the others are computed with tiles */
    const int64_t *tokens, *positions, *kv_indices, *starts, *lengths, *offsets;
    const int32_t *pages;
    uint16_t *const *keys, *const *values; /* by layer, in bfloat16: [positions of the KV cache, KV heads, head_dim] */
    float *x;                           /* [tokens, hidden]: the result */
    uint8_t *scratch;                   /* scratch_bytes() */
    int64_t num_threads;
    const Adapter *const *adapters; /* by token: [layers, NUM_ADAPTED] or NULL; NULL: no token has one */
} Batch;

typedef struct { /* attention of up to QUERIES tokens of a row, to all positions or to one chunk of them */
    int64_t row, first, chunk; /* first: of the row's tokens; chunk -1: all of them */
    int64_t partial;           /* its place in the partial results, with a chunk */
} Task;

typedef struct { /* attention of some tokens of a row, for the query heads of one KV head, with tiles */
    int64_t row, first, head;
} TileTask;

typedef struct { /* of a matrix */
    Rounded rounded;  /* of the tokens of decode rows */
    uint16_t *halves; /* of the others */
} Operand;

typedef struct {
    Operand input, gated; /* gated: of `down`, written while others read the input of `gate_up` */
    float *qkv, *attended, *gate_up, *block; /* block: what a block adds to x, where a norm follows it */
    Task *tasks;
    TileTask *tile_tasks;
    float *partials;
    int64_t num_decodes; /* tokens of decode rows */
    int64_t num_tasks, num_tile_tasks, num_partials;
} Scratch;

INLINE int64_t max2(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
INLINE int64_t qkv_size(const Model *m) { return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }

/* Queries of a task, at most, and the floats of their partial result: outputs, then maxima, then totals. */
INLINE int64_t max_queries(const Model *m) { return QUERIES * m->num_heads; }
INLINE int64_t width_for(int64_t size) { return (size + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
INLINE int64_t width_of(const Model *m) { return width_for(m->head_dim); }
INLINE int64_t partial_size(const Model *m) { return (max_queries(m) * (width_of(m) + 2) + 15) / 16 * 16; }

/* Tokens of a TileTask: those of at most 8 tiles of 16 queries, so that few threads have even work. */
INLINE int64_t tile_tokens(const Model *m) {
    int64_t heads = m->num_heads / m->num_kv_heads;
    return heads < 128 ? 128 / heads : 1;
}

/* Lists the tasks of attention, longest first. Where there are few, those of one block of tokens are divided by chunks:
   this changes who computes what and no result. */
static void list_tasks(const Model *m, const Batch *b, Scratch *s) {
    int64_t blocks = 0, num = 0, partials = 0;
    for (int64_t row = 0; row < b->num_decode_rows; row++) blocks += (b->lengths[row] + QUERIES - 1) / QUERIES;
    int divides = blocks < 4 * b->num_threads;
    for (int64_t row = b->num_decode_rows - 1; row >= 0; row--)
        for (int64_t first = (b->lengths[row] - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES) {
            int64_t rest = b->lengths[row] - first;
            int64_t end = b->starts[row] + first + (rest < QUERIES ? rest : QUERIES);
            int64_t chunks = divides ? (end + CHUNK - 1) / CHUNK : 1;
            for (int64_t chunk = 0; chunk < chunks; chunk++, num++)
                if (s->tasks) s->tasks[num] = (Task){row, first, divides ? chunk : -1, divides ? partials++ : -1};
                else partials += divides;
        }
    s->num_tasks = num, s->num_partials = partials, s->num_tile_tasks = 0;
    int64_t tokens = tile_tokens(m);
    for (int64_t row = b->num_rows - 1; row >= b->num_decode_rows; row--)
        for (int64_t first = (b->lengths[row] - 1) / tokens * tokens; first >= 0; first -= tokens)
            for (int64_t head = 0; head < m->num_kv_heads; head++, s->num_tile_tasks++)
                if (s->tile_tasks) s->tile_tasks[s->num_tile_tasks] = (TileTask){row, first, head};
}

static int64_t lay_out(const Model *m, const Batch *b, uint8_t *at, Scratch *s) {
    uint8_t *first = at;
    int64_t tokens = b->num_tokens;
    int64_t decodes = b->num_decode_rows < b->num_rows ? b->offsets[b->num_decode_rows] : tokens;
    s->num_decodes = decodes, s->tasks = NULL, s->tile_tasks = NULL;
    list_tasks(m, b, s);
#define TAKE(field, type, count) s->field = (type *)at, at += padded((count) * (int64_t)sizeof(type))
#define TAKE_OPERAND(field, groups)                                   \
    TAKE(field.rounded.high, int8_t, decodes * (groups) * GROUP);      \
    TAKE(field.rounded.low, int8_t, decodes * (groups) * GROUP);       \
    TAKE(field.rounded.scales, float, decodes * (groups));            \
    TAKE(field.rounded.sums, float, decodes * (groups));              \
    TAKE(field.halves, uint16_t, (tokens - decodes + 15) / 16 * 16 * (groups) * GROUP)
    TAKE_OPERAND(input, groups_of(max2(m->hidden, m->num_heads * m->head_dim)));
    TAKE_OPERAND(gated, groups_of(m->ffn));
#undef TAKE_OPERAND
    TAKE(qkv, float, tokens * qkv_size(m));
    TAKE(attended, float, tokens * m->num_heads * m->head_dim);
    TAKE(gate_up, float, tokens * 2 * m->ffn);
    TAKE(block, float, tokens * m->hidden);
    TAKE(tasks, Task, s->num_tasks);
    TAKE(tile_tasks, TileTask, s->num_tile_tasks);
    TAKE(partials, float, s->num_partials * partial_size(m));
#undef TAKE
    return at - first;
}

int64_t scratch_bytes(const Model *model, const Batch *batch) {
    Scratch unused;
    return lay_out(model, batch, (uint8_t *)64, &unused);
}

typedef struct { /* of the queries of a task, by head and then by token */
    /* [queries, width] twice, [queries] twice; top: the largest score so far. The order of dimensions is that of
       load_halves: of each 2 * LANES first the even ones. */
    float *queries, *out, *top, *totals;
    int64_t size, width, window, first, tokens; /* first: position of the first token */
    float cap;
} Attention;

/* In the functions below `size` is a->size, or a constant that equals it. */

/* Scores of the keys from `first` on, LANES of them, for queries i to i + N - 1. */
INLINE void scores_of(const Attention *a, int64_t i, const int N, const int64_t size, const uint16_t *const *keys,
                      int first, float scores[][KEYS]) {
    const int64_t width = width_for(size);
    vf sums[TOGETHER][LANES];
    const float *queries = a->queries + i * width;
#pragma GCC unroll 2
    for (int j = 0; j < LANES; j++) {
        vf acc[TOGETHER];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[n] = (vf){0};
#pragma GCC unroll 4
        for (int64_t d = 0; d < size; d += 2 * LANES) {
            vi key = load_halves(keys[first + j] + d, size - d);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const float *query = queries + n * width + d;
                acc[n] = fma_(odd_of(key), load(query + LANES), fma_(even_of(key), load(query), acc[n]));
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[n][j] = acc[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(scores[n] + first, sum_lanes(sums[n]));
}

/* 2 * LANES * U columns, from d on, of out = out * factor + the sum of weights[j] * values[j], j from first to last, of
   queries i to i + N - 1. */
INLINE void add_columns(const Attention *a, int64_t i, const float *factors, float weights[][KEYS],
                        const uint16_t *const *values, int first, int last, int64_t d, const int N, const int U,
                        const int64_t size) {
    const int64_t width = width_for(size);
    vf acc[TOGETHER][4];
    float *out = a->out + i * width + d;
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int u = 0; u < 2 * U; u++) acc[n][u] = load(out + n * width + u * LANES) * splat(factors[n]);
    for (int j = first; j <= last; j++)
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) {
            vi value = load_halves(values[j] + d + u * 2 * LANES, size - d - u * 2 * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                vf weight = splat(weights[n][j]);
                acc[n][2 * u] = fma_(weight, even_of(value), acc[n][2 * u]);
                acc[n][2 * u + 1] = fma_(weight, odd_of(value), acc[n][2 * u + 1]);
            }
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int u = 0; u < 2 * U; u++) store(out + n * width + u * LANES, acc[n][u]);
}

/* Adds the keys from position `base` on to queries i to i + N - 1. */
INLINE void add_keys(const Attention *a, int64_t i, const int N, const int64_t size, int64_t base, int num,
                     const uint16_t *const *keys, const uint16_t *const *values) {
    const int64_t width = width_for(size);
    float scores[TOGETHER][KEYS] ALIGNED, weights[TOGETHER][KEYS] ALIGNED, sums[TOGETHER] = {0};
    float before[LANES] ALIGNED = {0}, top[LANES] ALIGNED = {0};
    int first = KEYS, last = -1;
    for (int j = 0; j < num; j += LANES) scores_of(a, i, N, size, keys, j, scores);
    for (int n = 0; n < N; n++) {
        int64_t position = a->first + (i + n) % a->tokens;
        int newest = (int)(position - base < num - 1 ? position - base : num - 1); /* that this query sees */
        int oldest = a->window && position - a->window >= base ? (int)(position - a->window - base) + 1 : 0;
        before[n] = top[n] = a->top[i + n];
        if (oldest > newest) {
            if (before[n] == -INFINITY) before[n] = top[n] = 0;
            for (int j = 0; j < KEYS; j++) weights[n][j] = 0;
            continue;
        }
        if (a->cap > 0)
            for (int j = 0; j < num; j++) scores[n][j] = a->cap * tanhf(scores[n][j] / a->cap);
        if (oldest > 0 || newest < KEYS - 1)
            for (int j = 0; j < KEYS; j++) scores[n][j] = j >= oldest && j <= newest ? scores[n][j] : -INFINITY;
        vf most = load(scores[n]), sum = {0};
        for (int v = 1; v < KEYS / LANES; v++) most = larger(load(scores[n] + v * LANES), most);
        float largest = largest_lane(most);
        a->top[i + n] = top[n] = largest > before[n] ? largest : before[n];
        for (int v = 0; v < KEYS / LANES; v++) {
            vf weight = exp_(load(scores[n] + v * LANES) - splat(top[n]));
            store(weights[n] + v * LANES, weight);
            sum += weight;
        }
        sums[n] = lane_sum(sum);
        first = oldest < first ? oldest : first;
        last = newest > last ? newest : last;
    }
    float factors[LANES];
    store(factors, exp_(load(before) - load(top)));
    for (int n = 0; n < N; n++) a->totals[i + n] = a->totals[i + n] * factors[n] + sums[n];
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        add_columns(a, i, factors, weights, values, first, last, d, N, 2, size);
    if (d < width) add_columns(a, i, factors, weights, values, first, last, d, N, 1, size);
}

static void clear(const Attention *a, int64_t count) {
    for (int64_t i = 0; i < count; i++) a->top[i] = -INFINITY, a->totals[i] = 0;
    memset(a->out, 0, count * a->width * sizeof(float));
}

INLINE int64_t tokens_of(const Batch *b, const Task *task) {
    int64_t rest = b->lengths[task->row] - task->first;
    return rest < QUERIES ? rest : QUERIES;
}

/* The first position of a chunk that these tokens of a row read, and the one after the last. */
INLINE Part positions_of(int64_t first, int64_t tokens, int64_t window, int64_t chunk) {
    int64_t end = first + tokens, oldest = window ? first - window + 1 : 0;
    Part part = {chunk * CHUNK, (chunk + 1) * CHUNK < end ? (chunk + 1) * CHUNK : end};
    if (oldest > part.first) part.first = oldest / KEYS * KEYS;
    return part;
}

/* Positions from `position` on that are next to each other in the KV cache. at: the first key, and the first value. */
INLINE int64_t run_of(const Model *m, const Batch *b, int64_t row, int64_t position, int64_t end, int64_t *at) {
    int64_t in_page = position % b->page_size, page = b->pages[row * b->num_pages + position / b->page_size];
    *at = (page * b->page_size + in_page) * m->num_kv_heads * m->head_dim;
    return b->page_size - in_page < end - position ? b->page_size - in_page : end - position;
}

INLINE void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const uint8_t *)from + i, 0, 2);
}

static void prefetch_chunk(const Model *m, const Layer *layer, const Batch *b, int64_t index, const Task *task,
                           int64_t chunk) {
    int64_t row = task->row;
    Part part = positions_of(b->starts[row] + task->first, tokens_of(b, task), layer->window, chunk);
    for (int64_t position = part.first, run, at; position < part.end; position += run) {
        run = run_of(m, b, row, position, part.end, &at);
        int64_t bytes = run * m->num_kv_heads * m->head_dim * sizeof(uint16_t);
        prefetch(b->keys[index] + at, bytes);
        prefetch(b->values[index] + at, bytes);
    }
}

INLINE void attend_chunk_of(const Model *m, const Batch *b, const Attention *a, int64_t index, int64_t row,
                            int64_t chunk, const int64_t size) {
    int64_t per_head = m->num_heads / m->num_kv_heads * a->tokens, stride = m->num_kv_heads * size;
    Part part = positions_of(a->first, a->tokens, a->window, chunk);
    clear(a, m->num_heads * a->tokens);
    for (int64_t base = part.first; base < part.end; base += KEYS) {
        const uint16_t *keys[KEYS], *values[KEYS];
        int num = (int)(part.end - base < KEYS ? part.end - base : KEYS);
        for (int64_t j = 0, run, at; j < num; j += run) {
            run = run_of(m, b, row, base + j, base + num, &at);
            for (int64_t i = 0; i < run; i++)
                keys[j + i] = b->keys[index] + at + i * stride, values[j + i] = b->values[index] + at + i * stride;
        }
        for (int j = num; j < KEYS; j++) keys[j] = keys[0]; /* hidden from all queries */
        for (int64_t head = 0; head < m->num_kv_heads; head++) {
            int64_t i = head * per_head, last = i + per_head;
            for (; i + TOGETHER <= last; i += TOGETHER) add_keys(a, i, TOGETHER, size, base, num, keys, values);
            if (TOGETHER > 3 && i + 3 <= last) add_keys(a, i, 3, size, base, num, keys, values), i += 3;
            for (; i + 2 <= last; i += 2) add_keys(a, i, 2, size, base, num, keys, values);
            if (i < last) add_keys(a, i, 1, size, base, num, keys, values);
            for (int j = 0; j < KEYS; j++) keys[j] += size;
            for (int j = 0; j < num; j++) values[j] += size;
        }
    }
}

/* Attention to the positions of one chunk, from nothing. */
static void attend_chunk(const Model *m, const Batch *b, const Attention *a, int64_t index, int64_t row,
                         int64_t chunk) {
    if (a->size == 64) attend_chunk_of(m, b, a, index, row, chunk, 64);
    else if (a->size == 128) attend_chunk_of(m, b, a, index, row, chunk, 128);
    else attend_chunk_of(m, b, a, index, row, chunk, a->size);
}

/* Merges the result over the positions of a chunk into that over the positions before. */
static void merge(const Attention *to, const Attention *chunk, int64_t count) {
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t num = count - first < LANES ? count - first : LANES;
        vf before = load_first(to->top + first, num), top = load_first(chunk->top + first, num);
        vf largest = larger(top, before), finite = choose(largest == splat(-INFINITY), splat(0), largest);
        vf old = exp_(before - finite), new = exp_(top - finite);
        for (int64_t l = 0; l < num; l++) {
            int64_t i = first + l;
            to->totals[i] = to->totals[i] * old[l] + chunk->totals[i] * new[l];
            to->top[i] = largest[l];
            float *out = to->out + i * to->width;
            const float *more = chunk->out + i * to->width;
            for (int64_t d = 0; d < to->width; d += LANES)
                store(out + d, load(out + d) * splat(old[l]) + load(more + d) * splat(new[l]));
        }
    }
}

/* Stores some groups of the input of a matrix with `columns` columns, of one token. x: its row. */
static void set_input(const Scratch *s, const Operand *input, const float *x, int64_t columns, int64_t token,
                      Part groups) {
    Rounded to = input->rounded;
    to.columns = groups_of(columns) * GROUP;
    if (token < s->num_decodes) round_row(x, columns, &to, token, groups);
#if TILES
    else halve_row(x, columns, token - s->num_decodes, groups, input->halves);
#endif
}

/* Writes the result of some tokens, from `token` of the batch on, and sets it as the input of the next matrix. */
static void write_result(const Model *m, const Scratch *s, const Attention *a, int64_t token) {
    for (int64_t i = 0; i < m->num_heads * a->tokens; i++) {
        float *to = s->attended + ((token + i % a->tokens) * m->num_heads + i / a->tokens) * a->size;
        vf total = splat(a->totals[i]);
        for (int64_t d = 0; d < a->size; d += 2 * LANES) {
            vf even = load(a->out + i * a->width + d) / total, odd = load(a->out + i * a->width + d + LANES) / total;
            store_first(to + d, FROM(even, odd, (l >> 1) + (l & 1) * LANES), a->size - d);
            store_first(to + d + LANES, FROM(even, odd, ((l + LANES) >> 1) + (l & 1) * LANES), a->size - d - LANES);
        }
    }
    int64_t columns = m->num_heads * a->size;
    for (int64_t t = token; t < token + a->tokens; t++)
        set_input(s, &s->input, s->attended + t * columns, columns, t, (Part){0, groups_of(columns)});
}

INLINE Attention in_partial(const Model *m, const Batch *b, const Scratch *s, const Task *task) {
    float *out = s->partials + task->partial * partial_size(m), *top = out + max_queries(m) * width_of(m);
    return (Attention){.out = out, .top = top, .totals = top + max_queries(m), .size = m->head_dim,
                       .width = width_of(m), .tokens = tokens_of(b, task)};
}

/* The chunk that a task begins with. */
INLINE int64_t first_chunk(const Layer *layer, const Batch *b, const Task *task) {
    if (task->chunk >= 0) return task->chunk;
    int64_t oldest = b->starts[task->row] + task->first - layer->window + 1;
    return layer->window && oldest > 0 ? oldest / CHUNK : 0;
}

/* One task of attention: writes its partial result, or the result if it is not divided by chunks. The keys and values of
   its first chunk were prefetched; those of the next task (or NULL) are meanwhile. */
static void attend(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, int64_t index,
                   const Task *task, const Task *next) {
    int64_t size = m->head_dim, tokens = tokens_of(b, task), count = m->num_heads * tokens, stride = qkv_size(m);
    int64_t token = b->offsets[task->row] + task->first, start = b->starts[task->row] + task->first;
    int64_t width = width_of(m);
    float queries[count * width] ALIGNED, own[task->chunk < 0 ? count * (width + 2) : 1] ALIGNED;
    for (int64_t i = 0; i < count; i++) {
        const float *q = s->qkv + (token + i % tokens) * stride + i / tokens * size;
        for (int64_t d = 0; d < width; d += 2 * LANES) {
            vf first = load_first(q + d, size - d), second = load_first(q + d + LANES, size - d - LANES);
            store(queries + i * width + d, FROM(first, second, 2 * l) * splat(m->scale));
            store(queries + i * width + d + LANES, FROM(first, second, 2 * l + 1) * splat(m->scale));
        }
    }
    Attention part = {queries, own, own + count * width, own + count * (width + 1), size, width, layer->window, start,
                      tokens, m->score_cap};
    if (task->chunk >= 0) {
        Attention place = in_partial(m, b, s, task);
        part.out = place.out, part.top = place.top, part.totals = place.totals;
        if (next) prefetch_chunk(m, layer, b, index, next, first_chunk(layer, b, next));
        attend_chunk(m, b, &part, index, task->row, task->chunk);
        return;
    }
    float out[count * width] ALIGNED, top[count], totals[count];
    Attention all = {NULL, out, top, totals, size, width, 0, 0, tokens, 0};
    clear(&all, count);
    for (int64_t chunk = first_chunk(layer, b, task); chunk * CHUNK < start + tokens; chunk++) {
        if ((chunk + 1) * CHUNK < start + tokens) prefetch_chunk(m, layer, b, index, task, chunk + 1);
        else if (next) prefetch_chunk(m, layer, b, index, next, first_chunk(layer, b, next));
        attend_chunk(m, b, &part, index, task->row, chunk);
        merge(&all, &part, count);
    }
    write_result(m, s, &all, token);
}

/* The result of a block of tokens from those of its chunks, of which `task` is the first. */
static void attend_merged(const Model *m, const Batch *b, const Scratch *s, const Task *task, const Task *end) {
    int64_t size = m->head_dim, width = width_of(m), tokens = tokens_of(b, task), count = m->num_heads * tokens;
    int64_t token = b->offsets[task->row] + task->first;
    float out[count * width] ALIGNED, top[count], totals[count];
    Attention all = {NULL, out, top, totals, size, width, 0, 0, tokens, 0};
    clear(&all, count);
    for (const Task *one = task; one < end && one->row == task->row && one->first == task->first; one++) {
        Attention part = in_partial(m, b, s, one);
        merge(&all, &part, count);
    }
    write_result(m, s, &all, token);
}

#if TILES
/* Attention of a task with tiles: for each block of CHUNK positions, scores[positions, queries] = K Q', then out[head_dim,
   queries] += V' weights, where the positions or head_dim are the rows of tiles and 16 queries their columns. */
static void attend_tiles(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, int64_t index,
                         const TileTask *task) {
    enum { HALVES = 16 * 32, FLOATS = 16 * 16 }; /* of a tile */
    int64_t size = m->head_dim, steps = (size + 31) / 32, dims = (size + 15) / 16, stride = qkv_size(m);
    int64_t heads = m->num_heads / m->num_kv_heads, tokens = b->lengths[task->row] - task->first;
    if (tokens > tile_tokens(m)) tokens = tile_tokens(m);
    int64_t count = heads * tokens, tiles = (count + 15) / 16; /* queries, by head and then by token */
    int64_t token = b->offsets[task->row] + task->first, start = b->starts[task->row] + task->first;
    uint16_t queries[tiles * steps * HALVES] ALIGNED;
    uint16_t keys[CHUNK / 16 * steps * HALVES] ALIGNED;
    uint16_t values[dims * CHUNK / 32 * HALVES] ALIGNED;
    uint16_t weights[CHUNK / 32 * HALVES] ALIGNED;
    float out[tiles * dims * FLOATS] ALIGNED, scores[CHUNK][16] ALIGNED;
    vf top[tiles], totals[tiles];
    vi positions[tiles], rows[16];
    for (int64_t q = 0; q < tiles; q++) {
        top[q] = splat(-INFINITY), totals[q] = splat(0);
        for (int64_t step = 0; step < steps; step++) {
            for (int64_t i = 0; i < 16; i++) {
                int64_t query = q * 16 + i < count ? q * 16 + i : count - 1, rest = size - step * 32;
                const float *at = s->qkv + (token + query % tokens) * stride +
                                  (task->head * heads + query / tokens) * size + step * 32;
                vf scale = splat(m->scale);
                store_halves((uint16_t *)(rows + i), load_first(at, rest) * scale,
                             load_first(at + 16, rest - 16) * scale);
                positions[q][i] = start + query % tokens;
            }
            transpose_tile(rows);
            memcpy(queries + (q * steps + step) * HALVES, rows, sizeof rows);
        }
    }
    memset(out, 0, sizeof out);
    int64_t end = start + tokens, oldest = layer->window && start >= layer->window ? start - layer->window + 1 : 0;
    for (int64_t base = oldest / CHUNK * CHUNK; base < end; base += CHUNK) {
        int64_t num = end - base < CHUNK ? end - base : CHUNK;
        const uint16_t *key_rows[CHUNK], *value_rows[CHUNK];
        for (int64_t j = 0; j < num; j++) {
            int64_t position = base + j, page = b->pages[task->row * b->num_pages + position / b->page_size];
            int64_t at = ((page * b->page_size + position % b->page_size) * m->num_kv_heads + task->head) * size;
            key_rows[j] = b->keys[index] + at, value_rows[j] = b->values[index] + at;
        }
        for (int64_t j = 0; j < CHUNK; j++)
            for (int64_t step = 0; step < steps; step++) {
                vi key = j < num ? load_halves(key_rows[j] + step * 32, size - step * 32) : (vi){0};
                memcpy(keys + ((j / 16 * steps + step) * 16 + j % 16) * 32, &key, sizeof key);
            }
        for (int64_t half = 0; half < CHUNK / 32; half++)
            for (int64_t d = 0; d < size; d += 32) { /* pairs of positions, of even and of odd dimensions */
                vi even[16], odd[16], low[16], high[16];
                for (int64_t i = 0; i < 16; i++) {
                    int64_t j = half * 32 + 2 * i;
                    vi one = j < num ? load_halves(value_rows[j] + d, size - d) : (vi){0};
                    vi two = j + 1 < num ? load_halves(value_rows[j + 1] + d, size - d) : (vi){0};
                    even[i] = (one & 0xffff) | two << 16;
                    odd[i] = (one >> 16 & 0xffff) | (two & (int32_t)0xffff0000);
                }
                transpose_tile(even);
                transpose_tile(odd);
                for (int i = 0; i < 8; i++) {
                    low[2 * i] = even[i], low[2 * i + 1] = odd[i];
                    high[2 * i] = even[8 + i], high[2 * i + 1] = odd[8 + i];
                }
                memcpy(values + (d / 16 * (CHUNK / 32) + half) * HALVES, low, sizeof low);
                if (d + 16 < size) memcpy(values + ((d / 16 + 1) * (CHUNK / 32) + half) * HALVES, high, sizeof high);
            }
        /* Whether some queries do not see some of these positions. */
        int hides = base + CHUNK - 1 > start || (layer->window && base <= end - 1 - layer->window);
        for (int64_t q = 0; q < tiles; q++) {
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
            for (int64_t step = 0; step < steps; step++) {
                tile_load(4, queries + (q * steps + step) * HALVES, 64);
                tile_load(5, keys + step * HALVES, 64);
                tile_dot(0, 5, 4);
                tile_load(6, keys + (steps + step) * HALVES, 64);
                tile_dot(1, 6, 4);
                tile_load(5, keys + (2 * steps + step) * HALVES, 64);
                tile_dot(2, 5, 4);
                tile_load(6, keys + (3 * steps + step) * HALVES, 64);
                tile_dot(3, 6, 4);
            }
            tile_store(0, scores[0], 64);
            tile_store(1, scores[16], 64);
            tile_store(2, scores[32], 64);
            tile_store(3, scores[48], 64);
            if (m->score_cap > 0) /* cap * tanh(x / cap) */
                for (int64_t j = 0; j < CHUNK; j++) {
                    vf x = load(scores[j]) * splat(2 / m->score_cap);
                    x = choose(x > splat(80), splat(80), x);
                    store(scores[j], splat(m->score_cap) - splat(2 * m->score_cap) / (exp_(x) + splat(1)));
                }
            if (hides)
                for (int64_t j = 0; j < CHUNK; j++) {
                    vi position = (vi){0} + (int32_t)(base + j), sees = position <= positions[q];
                    if (layer->window) sees &= position > positions[q] - (int32_t)layer->window;
                    store(scores[j], choose(sees, load(scores[j]), splat(-INFINITY)));
                }
            vf most = top[q], sum = {0};
            for (int64_t j = 0; j < CHUNK; j++) most = larger(load(scores[j]), most);
            vf largest = choose(most == splat(-INFINITY), splat(0), most); /* no position is visible yet */
            for (int64_t j = 0; j < CHUNK; j += 2) {
                vf one = exp_(load(scores[j]) - largest), two = exp_(load(scores[j + 1]) - largest);
                vi both = pairs(one, two);
                sum += one + two;
                memcpy(weights + j * 16, &both, sizeof both);
            }
            vf factor = choose(top[q] == splat(-INFINITY), splat(0), exp_(top[q] - largest));
            totals[q] = totals[q] * factor + sum, top[q] = most;
            float *sums = out + q * dims * FLOATS;
            for (int64_t i = 0; i < dims * 16; i++) store(sums + i * 16, load(sums + i * 16) * factor);
            for (int64_t d = 0; d < dims; d++, sums += FLOATS) {
                const uint16_t *at = values + d * (CHUNK / 32) * HALVES;
                tile_load(0, sums, 64);
                tile_load(4, weights, 64);
                tile_load(5, at, 64);
                tile_dot(0, 5, 4);
                tile_load(6, weights + HALVES, 64);
                tile_load(7, at + HALVES, 64);
                tile_dot(0, 7, 6);
                tile_store(0, sums, 64);
            }
        }
    }
    for (int64_t q = 0; q < tiles; q++)
        for (int64_t d = 0; d < dims; d++) {
            const float *sums = out + (q * dims + d) * FLOATS;
            for (int i = 0; i < 16; i++) rows[i] = (vi)(load(sums + i * 16) / totals[q]);
            transpose_tile(rows);
            for (int64_t i = 0; i < 16 && q * 16 + i < count; i++) {
                int64_t query = q * 16 + i, rest = size - d * 16;
                float *to = s->attended + (token + query % tokens) * m->num_heads * size +
                            (task->head * heads + query / tokens) * size + d * 16;
                memcpy(to, rows + i, (rest < 16 ? rest : 16) * sizeof(float));
            }
        }
}
#endif

/* The functions below are called by all threads of a region. */

/* Sets x, or norm(x), as the inputs of a matrix with `columns` columns, from token `first` on. Where there are fewer
   tokens than threads, these divide rows. */
static void set_inputs(const Thread *thread, const Model *m, const Batch *b, const Scratch *s, int64_t first,
                       const float *x, int64_t columns, const float *norm) {
    int64_t tokens = b->num_tokens - first, per_token = (thread->count + tokens - 1) / tokens;
    int64_t groups = groups_of(columns);
    Part part = part_of(thread, tokens * per_token);
    for (int64_t i = part.first; i < part.end; i++) {
        int64_t token = first + i / per_token, piece = i % per_token;
        const float *row = x + token * columns;
        float normed[norm ? columns : 1];
        if (norm) norm_row(row, norm, columns, m->eps, normed);
        set_input(s, &s->input, norm ? normed : row, columns, token,
                  (Part){groups * piece / per_token, groups * (piece + 1) / per_token});
    }
    wait_for_all(thread);
}

/* A tile of the output y of a matrix, or what it adds to y. */
static void apply_tile(const Matrix *w, const Operand *input, int64_t tile, const Batch *b, const Scratch *s, float *y,
                       int add) {
    Rounded x = input->rounded;
    x.columns = groups_of(w->columns) * GROUP;
    product(w, tile, &x, s->num_decodes, y, add);
#if TILES
    if (s->num_decodes < b->num_tokens)
        halves_product(w, tile, input->halves, b->num_tokens - s->num_decodes, y + s->num_decodes * w->rows, add);
#endif
}

static void apply(const Thread *thread, const Matrix *w, const Operand *input, const Batch *b, const Scratch *s,
                  float *y, int add) {
    Loop tiles = loop_of(thread, tiles_of(w));
    for (int64_t tile; (tile = take(&tiles)) >= 0;) apply_tile(w, input, tile, b, s, y, add);
    wait_for_all(thread);
}

/* y += what the adapters of the tokens add to a matrix whose input is x, or norm(x). `at`: layer and matrix. */
static void add_adapters(const Thread *thread, const Model *m, const Batch *b, int64_t at, const float *x,
                         int64_t stride, int64_t columns, const float *norm, float *y, int64_t y_stride) {
    if (!b->adapters) return;
    for (int64_t t = thread->index; t < b->num_tokens; t += thread->count) { /* neighbours have the same adapter */
        const Adapter *own = b->adapters[t] ? b->adapters[t] + at : NULL;
        if (!own || !own->num_parts) continue;
        float normed[norm ? columns : 1], between[MAX_RANK];
        const float *input = x + t * stride;
        if (norm) {
            norm_row(input, norm, columns, m->eps, normed);
            input = normed;
        }
        for (const LowRank *part = own->parts; part < own->parts + own->num_parts; part++) {
            float *out = y + t * y_stride + part->first;
            for (int64_t r = 0; r < part->rank; r++) between[r] = dot(input, part->a + r * columns, columns);
            for (int64_t i = 0; i < part->rows; i++) out[i] += dot(between, part->b + i * part->rank, part->rank);
        }
    }
    wait_for_all(thread);
}

/* x += matrix(input), with a norm in between where the model has one. unrounded: the input, for adapters. */
static void add_block(const Thread *thread, const Model *m, const Matrix *w, const Operand *input, const Batch *b,
                      Scratch *s, const float *post_norm, int64_t at, const float *unrounded, int64_t stride) {
    float *out = post_norm ? s->block : b->x;
    apply(thread, w, input, b, s, out, !post_norm);
    add_adapters(thread, m, b, at, unrounded, stride, w->columns, NULL, out, m->hidden);
    if (!post_norm) return;
    Part part = part_of(thread, b->num_tokens);
    for (int64_t t = part.first; t < part.end; t++) {
        const float *y = s->block + t * m->hidden;
        float factor = inverse_rms(y, m->hidden, m->eps), *x = b->x + t * m->hidden;
        for (int64_t i = 0; i < m->hidden; i++) x[i] += y[i] * factor * post_norm[i];
    }
    wait_for_all(thread);
}

/* A group of the input of `down`: activation(gate) * up. */
static void multiply_gate(const Model *m, const Batch *b, const Scratch *s, int64_t group) {
    for (int64_t t = 0; t < b->num_tokens; t++) {
        float *gate = s->gate_up + t * 2 * m->ffn, *up = gate + m->ffn;
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP && i < m->ffn; i += LANES) {
            /* Both are x * sigmoid(u): (1 + tanh(v)) / 2 is sigmoid(2 v). */
            vf x = load_first(gate + i, m->ffn - i), u = x;
            if (m->activation) u = splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x);
            vf negated = choose(u < splat(-88.0f), splat(88.0f), -u);
            vf value = x / (splat(1.0f) + exp_(negated)) * load_first(up + i, m->ffn - i);
            store_first(gate + i, value, m->ffn - i);
        }
        set_input(s, &s->gated, gate, m->ffn, t, (Part){group, group + 1});
    }
}

static void run_layer(const Thread *thread, const Model *m, const Batch *b, Scratch *s, int64_t index) {
    const Layer *layer = m->layers + index;
    int64_t size = m->head_dim, num_qk = m->num_heads + m->num_kv_heads, stride = qkv_size(m);
    set_inputs(thread, m, b, s, 0, b->x, m->hidden, layer->attention_norm);
    apply(thread, &layer->qkv, &s->input, b, s, s->qkv, 0);
    int64_t at = index * NUM_ADAPTED;
    add_adapters(thread, m, b, at + QKV, b->x, m->hidden, m->hidden, layer->attention_norm, s->qkv, stride);
    const Part tokens = part_of(thread, b->num_tokens);
    for (int64_t t = tokens.first; t < tokens.end; t++) {
        float *heads = s->qkv + t * stride, *keys = heads + m->num_heads * size;
        if (layer->qk_norm && m->full_qk_norm) {
            norm_row(heads, layer->qk_norm, m->num_heads * size, m->eps, heads);
            norm_row(keys, layer->qk_norm + m->num_heads * size, m->num_kv_heads * size, m->eps, keys);
        }
        for (int64_t h = 0; h < num_qk; h++) {
            float *one = heads + h * size;
            if (layer->qk_norm && !m->full_qk_norm) norm_row(one, layer->qk_norm + h * size, size, m->eps, one);
            if (layer->rope) rotate(one, layer->rope + b->positions[t] * size, size);
        }
        int64_t at = b->kv_indices[t] * m->num_kv_heads * size;
        halve(keys, m->num_kv_heads * size, b->keys[index] + at);
        halve(heads + num_qk * size, m->num_kv_heads * size, b->values[index] + at);
    }
    Part own = part_of(thread, s->num_tasks);
    const Task *first = s->tasks + own.first;
    if (own.first < own.end) prefetch_chunk(m, layer, b, index, first, first_chunk(layer, b, first));
    wait_for_all(thread);
    Loop tasks = loop_of(thread, s->num_tasks);
    for (int64_t task; (task = take(&tasks)) >= 0;)
        attend(m, layer, b, s, index, s->tasks + task, task + 1 < tasks.part.end ? s->tasks + task + 1 : NULL);
    wait_for_all(thread);
#if TILES
    if (s->num_tile_tasks) {
        Loop tile_tasks = loop_of(thread, s->num_tile_tasks);
        for (int64_t task; (task = take(&tile_tasks)) >= 0;)
            attend_tiles(m, layer, b, s, index, s->tile_tasks + task);
        wait_for_all(thread);
    }
#endif
    if (s->num_partials) {
        Part part = part_of(thread, s->num_tasks);
        for (int64_t task = part.first; task < part.end; task++)
            if (s->tasks[task].chunk == 0) attend_merged(m, b, s, s->tasks + task, s->tasks + s->num_tasks);
        wait_for_all(thread);
    }
    if (s->num_decodes < b->num_tokens) /* the inputs of other tokens are set */
        set_inputs(thread, m, b, s, s->num_decodes, s->attended, m->num_heads * size, NULL);
    add_block(thread, m, &layer->out, &s->input, b, s, layer->attention_post_norm, at + OUT, s->attended,
              m->num_heads * size);

    set_inputs(thread, m, b, s, 0, b->x, m->hidden, layer->mlp_norm);
    int together = m->ffn % GROUP == 0 && !b->adapters; /* a group of gate, of up and of their product is one task */
    if (!together) {
        apply(thread, &layer->gate_up, &s->input, b, s, s->gate_up, 0);
        add_adapters(thread, m, b, at + GATE_UP, b->x, m->hidden, m->hidden, layer->mlp_norm, s->gate_up, 2 * m->ffn);
    }
    Loop groups = loop_of(thread, groups_of(m->ffn));
    for (int64_t group; (group = take(&groups)) >= 0;) {
        for (int64_t tile = group * GROUP / TILE; together && tile < (group + 1) * GROUP / TILE; tile++) {
            apply_tile(&layer->gate_up, &s->input, tile, b, s, s->gate_up, 0);
            apply_tile(&layer->gate_up, &s->input, tile + m->ffn / TILE, b, s, s->gate_up, 0);
        }
        multiply_gate(m, b, s, group);
    }
    wait_for_all(thread);
    add_block(thread, m, &layer->down, &s->gated, b, s, layer->mlp_post_norm, at + DOWN, s->gate_up, 2 * m->ffn);
}

/* scale * one row of a matrix. */
static void gather_row(const Matrix *w, int64_t row, float scale, float *out) {
    int64_t groups = groups_of(w->columns), lane = row % TILE, vec = lane / LANES, in_vec = lane % LANES;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *block = w->data + (row / TILE * groups + g) * block_bytes(w->bits);
        const uint16_t *halves = (const uint16_t *)block;
        float step = load_half(halves + vec * LANES)[in_vec], offset = load_half(halves + TILE + vec * LANES)[in_vec];
        for (int k = 0; k < GROUP && g * GROUP + k < w->columns; k++) {
            const uint8_t *packed = block + TILE * 4 + in_vec * 4 + k % 4;
            int s = k / 4, value;
            if (w->bits == 4) {
                value = packed[(s / 2 * VECS + vec) * LANES * 4] >> (s % 2 * 4) & 15;
            } else {
                uint8_t byte = packed[(s * VECS + vec) * LANES * 4];
                value = SIGNED ? (int8_t)byte : byte;
            }
            out[g * GROUP + k] = scale * (step * (float)value + offset);
        }
    }
}

/* The embeddings, all layers and the final norm. */
void forward(const Model *model, const Batch *batch) {
    Scratch scratch;
    Taken parts[batch->num_threads];
    Barrier barrier = {parts, num_spins()};
    memset(parts, 0, sizeof parts);
    lay_out(model, batch, batch->scratch, &scratch);
    list_tasks(model, batch, &scratch);
    int has_prompts = scratch.num_decodes < batch->num_tokens;
#pragma omp parallel num_threads(batch->num_threads)
    {
        Scratch own = scratch;
        Thread thread = this_thread(&barrier);
        Part part = part_of(&thread, batch->num_tokens);
        for (int64_t t = part.first; t < part.end; t++)
            gather_row(&model->embedding, batch->tokens[t], model->embedding_scale, batch->x + t * model->hidden);
        wait_for_all(&thread);
        if (has_prompts) begin_tiles();
        for (int64_t index = 0; index < model->num_layers; index++) run_layer(&thread, model, batch, &own, index);
        for (int64_t t = part.first; t < part.end; t++) {
            float *x = batch->x + t * model->hidden;
            norm_row(x, model->norm, model->hidden, model->eps, x);
        }
        if (has_prompts) end_tiles();
    }
}

/* ---------------------------------------------------------------- single matrices */

int64_t rounded_bytes(int64_t rows, int64_t columns) {
    int64_t groups = groups_of(columns);
    rows = (rows + 15) / 16 * 16; /* enough for a left operand of tiles, too */
    return 2 * (padded(rows * groups * GROUP) + padded(rows * groups * sizeof(float)));
}

/* y[rows, w.rows] = x[rows, w.columns] W' + bias, with tiles or without. scratch: rounded_bytes(). */
void linear(const Matrix *w, const float *x, int64_t rows, float *y, uint8_t *scratch, int64_t num_threads,
            int32_t tiles) {
    int64_t groups = groups_of(w->columns);
    Rounded to = {.columns = groups * GROUP, .high = (int8_t *)scratch};
    to.low = to.high + padded(rows * groups * GROUP);
    to.scales = (float *)(to.low + padded(rows * groups * GROUP));
    to.sums = to.scales + padded(rows * groups * sizeof(float)) / sizeof(float);
    Taken parts[num_threads];
    Barrier barrier = {parts, num_spins()};
    memset(parts, 0, sizeof parts);
#pragma omp parallel num_threads(num_threads)
    {
        Thread thread = this_thread(&barrier);
        Part part = part_of(&thread, rows), all = {0, groups};
        if (tiles) begin_tiles();
        for (int64_t row = part.first; row < part.end; row++)
#if TILES
            if (tiles) halve_row(x + row * w->columns, w->columns, row, all, (uint16_t *)scratch);
            else
#endif
                round_row(x + row * w->columns, w->columns, &to, row, all);
        wait_for_all(&thread);
        Loop loop = loop_of(&thread, tiles_of(w));
        for (int64_t tile; (tile = take(&loop)) >= 0;)
#if TILES
            if (tiles) halves_product(w, tile, (const uint16_t *)scratch, rows, y, 0);
            else
#endif
                product(w, tile, &to, rows, y, 0);
        if (tiles) end_tiles();
    }
}
