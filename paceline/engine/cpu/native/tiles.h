/* Tiles: matrix instructions for bfloat16 (AMX), and the same in plain C for tests.

   A tile is a register of 16 rows with 64 bytes each. tile_dot(c, a, b): c[16 rows][16] += a[16 rows][32] times b,
   whose rows are pairs: [16][16 columns][2]. a and b are bfloat16, c is float32. There are 8 tiles, whose numbers
   must be literals. Registers are those of a thread: each one calls begin_tiles() and end_tiles(). */

#pragma once

#include "vectors.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__) && AVX512 /* clang's older name */
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_dot _tile_dpbf16ps

/* Whether the system lets this process use tiles. */
int32_t has_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* their data */) == 0; }

static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } ALIGNED config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" ::"m"(config) : "memory"); /* gcc 12 does not know that the next line reads it */
    _tile_loadconfig(&config);
}

static void end_tiles(void) { _tile_release(); }

/* Two rows of numbers as pairs, in the lower and the upper 16 bits of a lane. */
INLINE vi bfloat16_pairs(vf low, vf high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vi)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

/* 32 numbers, one after the other. */
INLINE void store_bfloat16(uint16_t *to, vf first, vf second) {
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
static float bfloat16_value(uint16_t h) {
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
                    bfloat16_value(registers[a].h[row][k]) * bfloat16_value(registers[b].h[k / 2][2 * column + k % 2]);
}

static vi bfloat16_pairs(vf low, vf high) {
    vi both;
    for (int l = 0; l < LANES; l++) both[l] = bfloat16_bits(low[l]) >> 16 | (bfloat16_bits(high[l]) & 0xffff0000);
    return both;
}
static void store_bfloat16(uint16_t *to, vf first, vf second) {
    for (int l = 0; l < LANES; l++) to[l] = bfloat16_bits(first[l]) >> 16, to[16 + l] = bfloat16_bits(second[l]) >> 16;
}
#else
#define TILES 0
int32_t has_tiles(void) { return 0; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif

#if TILES
/* Transposes 16 rows of 16 numbers in place. */
INLINE void transpose_tile(vi rows[16]) {
#define EXCHANGE(width, ...)                  \
    UNROLL(16)                                \
    for (int i = 0; i < 16; i++) {            \
        if (i & width) continue;              \
        vi a = rows[i], b = rows[i + width];  \
        rows[i] = LOWER(a, b, width);         \
        rows[i + width] = UPPER(a, b, width); \
    }
    EACH_WIDTH(EXCHANGE)
#undef EXCHANGE
}
#endif
