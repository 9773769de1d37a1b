/* GEMMs with tiles, for the tokens of prompts: weights are expanded to bfloat16, inputs are rounded to it.

   They give other bits than those of `gemm.h`. Which of the two computes a token depends on the token alone, not on the
   batch it is in. */

#pragma once

#include "gemm.h"
#include "tiles.h"

#if TILES
#define BLOCK 64 /* groups of columns whose weights are in bfloat16 at a time: 128 KB */
#define ROW_TILE(groups) ((groups) * 16 * GROUP) /* numbers of 16 rows */

/* Rounds some groups of a row to bfloat16. The layout is by 16 rows, in these by groups: a group of 16 rows is the left
   operand of tile_dot(). */
static void round_row_bfloat16(const float *x, int64_t columns, int64_t row, Part groups, uint16_t *to) {
    to += row / 16 * ROW_TILE(groups_of(columns)) + row % 16 * GROUP;
    for (int64_t g = groups.first, k = g * GROUP; g < groups.end; g++, k += GROUP) {
        vf first = load_first(x + k, columns - k), second = load_first(x + k + LANES, columns - k - LANES);
        store_bfloat16(to + g * 16 * GROUP, first, second);
    }
}

/* Expands `groups` of a tile of weights to right operands: [groups][VECS][16 pairs of columns][LANES channels][2]. */
INLINE void expand_bfloat16(const uint8_t *tile, int64_t groups, const int bits, uint16_t *out) {
    for (int64_t g = 0; g < groups; g++, tile += block_bytes(bits))
        for (int v = 0; v < VECS; v++) {
            const uint16_t *halves = (const uint16_t *)tile;
            vf scale = load_float16(halves + v * LANES), offset = load_float16(halves + TILE + v * LANES);
            UNROLL(16)
            for (int pair = 0; pair < GROUP / 2; pair++, out += 2 * LANES) {
                int step = pair / 2, shift = pair % 2 * 16 + (bits == 4 ? step % 2 * 4 : 0);
                vi bytes = (vi)load_bytes(tile + TILE * 4 + ((bits == 4 ? step / 2 : step) * VECS + v) * LANES * 4);
                vi low = bytes >> shift & ((1 << bits) - 1), high = bytes >> (shift + 8) & ((1 << bits) - 1);
                vi both = bfloat16_pairs(fma_(to_float(low), scale, offset), fma_(to_float(high), scale, offset));
                memcpy(out, &both, sizeof both);
            }
        }
}

/* to[16 M, TILE] = from + A B. Strides are those of rows, in bytes. */
INLINE void multiply_tiles(const uint16_t *a, int64_t row_tile, const uint16_t *b, int64_t groups, const int M,
                           const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    int64_t second = from_stride / (int64_t)sizeof(float) * 16, to_second = to_stride / (int64_t)sizeof(float) * 16;
    tile_load(0, from, from_stride);
    tile_load(1, from + 16, from_stride);
    if (M == 2) {
        tile_load(2, from + second, from_stride);
        tile_load(3, from + second + 16, from_stride);
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
        tile_store(2, to + to_second, to_stride);
        tile_store(3, to + to_second + 16, to_stride);
    }
}

/* As gemm(), with x in bfloat16. */
static void gemm_bfloat16(const Matrix *w, int64_t t, const uint16_t *x, int64_t rows, float *y, int add) {
    static const float zeros[TILE];
    int64_t groups = groups_of(w->columns), bytes = block_bytes(w->bits);
    int64_t first = t * TILE, channels = min2(w->rows - first, TILE);
    uint16_t weights[BLOCK * TILE * GROUP] ALIGNED;
    float edge[2 * 16][TILE] ALIGNED;
    for (int64_t g = 0; g < groups; g += BLOCK) {
        int64_t num = min2(groups - g, BLOCK);
        const uint8_t *data = w->data + (t * groups + g) * bytes;
        const float *bias = g == 0 ? w->bias : NULL;
        int adds = add || g > 0;
        if (w->bits == 4) expand_bfloat16(data, num, 4, weights);
        else expand_bfloat16(data, num, 8, weights);
        for (int64_t row = 0; row < rows; row += 32) {
            int64_t count = min2(rows - row, 32);
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
