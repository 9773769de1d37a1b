/* GEMMs of quantized weights and inputs rounded to 15 bits, for generated tokens.

   Sums over the columns are float32, one group after the other, for any number of rows: gemm_sums() is compiled for
   ROWS rows and for one, and both give the same bits. Its arrays must stay in registers, so all loops over them are
   unrolled; look at the machine code after a change. */

#pragma once

#include "matrices.h"

#define SUM(r) (WORDS ? (r) % M : (r)) /* which sum a part of a row belongs to */

/* Sums of TILE channels for M rows of x. next: NULL, or bytes to prefetch meanwhile, `next_bytes` for each group. */
INLINE void gemm_sums(const uint8_t *tile, const Rounded *x, int64_t row, const int M, const int bits,
                         const uint8_t *next, int64_t next_bytes, vf out[ROWS][VECS]) {
    const int64_t groups = x->columns / GROUP;
    const int8_t *high = x->high + row * x->columns, *low = x->low + row * x->columns;
    const float *scales = x->scales + row * groups, *sums = x->sums + row * groups;
    vf total[ROWS][VECS];
    UNROLL(4)
    for (int r = 0; r < M; r++)
        UNROLL(2)
        for (int v = 0; v < VECS; v++) total[r][v] = (vf){0};
    for (int64_t g = 0; g < groups; g++, tile += block_bytes(bits), high += GROUP, low += GROUP) {
        if (next)
            for (const uint8_t *end = next + next_bytes; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        const uint8_t *w = tile + TILE * 4;
        Inputs inputs[2 * ROWS]; /* the high parts of all rows, then the low parts */
        vi acc[2 * ROWS][VECS];  /* with WORDS, both parts of a row have one sum */
        UNROLL(4)
        for (int r = 0; r < M; r++) {
            inputs[r] = load_inputs(high + r * x->columns);
            inputs[M + r] = load_inputs(low + r * x->columns);
        }
        UNROLL(8)
        for (int r = 0; r < 2 * M; r++)
            UNROLL(2)
            for (int v = 0; v < VECS; v++) acc[r][v] = (vi){0};
        UNROLL(8)
        for (int s = 0; s < STEPS; s += 8 / bits)
            UNROLL(2)
            for (int v = 0; v < VECS; v++, w += LANES * 4) {
                vb bytes = load_bytes(w), first = bits == 4 ? bytes & 15 : bytes;
                UNROLL(8)
                for (int r = 0; r < 2 * M; r++)
                    acc[SUM(r)][v] = dot4(acc[SUM(r)][v], first, inputs[r], s, r >= M);
                if (bits == 8) continue;
                UNROLL(8)
                for (int r = 0; r < 2 * M; r++)
                    acc[SUM(r)][v] = dot4(acc[SUM(r)][v], bytes >> 4, inputs[r], s + 1, r >= M);
            }
        const uint16_t *halves = (const uint16_t *)tile;
        UNROLL(2)
        for (int v = 0; v < VECS; v++) {
            vf scale = load_float16(halves + v * LANES), offset = load_float16(halves + TILE + v * LANES);
            UNROLL(4)
            for (int r = 0; r < M; r++) {
                vf sum = to_float(WORDS ? acc[r][v] : (acc[r][v] << 7) + acc[M + r][v]);
                total[r][v] = fma_(sum, scale * splat(scales[r * groups + g]), total[r][v]);
                total[r][v] = fma_(offset, splat(sums[r * groups + g]), total[r][v]);
            }
        }
    }
    UNROLL(4)
    for (int r = 0; r < M; r++)
        UNROLL(2)
        for (int v = 0; v < VECS; v++) out[r][v] = total[r][v];
}

/* Writes a tile of 4-bit values as one of 8-bit values, which are faster to read for many rows. */
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

/* Channels first to first + TILE - 1 of M rows: y = x W' + bias, or with `add` y += x W' + bias. */
INLINE void gemm_rows(const Matrix *w, const uint8_t *tile, int64_t first, const Rounded *x, int64_t row,
                         const int M, const int bits, const uint8_t *next, float *y, int add) {
    vf out[ROWS][VECS];
    gemm_sums(tile, x, row, M, bits, next, block_bytes(w->bits), out);
    int64_t count = min2(w->rows - first, TILE);
    UNROLL(4)
    for (int r = 0; r < M; r++) {
        float *target = y + (row + r) * w->rows + first;
        if (count == TILE) {
            UNROLL(2)
            for (int v = 0; v < VECS; v++) {
                vf value = out[r][v];
                if (w->bias) value += load(w->bias + first + v * LANES);
                if (add) value += load(target + v * LANES);
                store(target + v * LANES, value);
            }
        } else {
            float values[TILE];
            UNROLL(2)
            for (int v = 0; v < VECS; v++) store(values + v * LANES, out[r][v]);
            for (int64_t i = 0; i < count; i++) {
                float value = values[i];
                if (w->bias) value += w->bias[first + i];
                target[i] = add ? target[i] + value : value;
            }
        }
    }
}

/* Tile t of the channels of y[rows, w.rows] = x W' + bias, or with `add` of y += x W' + bias. */
static void gemm(const Matrix *w, int64_t t, const Rounded *x, int64_t rows, float *y, int add) {
    int64_t groups = x->columns / GROUP, row = 0;
    const uint8_t *tile = w->data + t * groups * block_bytes(w->bits);
    int expands = w->bits == 4 && rows >= 4 * ROWS;
    uint8_t expanded[expands ? groups * block_bytes(8) : 1];
    /* The next tile is prefetched while the last rows of this one are computed. With few rows, these read this tile
       from memory, too, and there is nothing to gain. */
    const uint8_t *after = rows > ROWS && t + 1 < tiles_of(w) ? tile + groups * block_bytes(w->bits) : NULL;
#define NEXT(count) (row + (count) == rows ? after : NULL)
    if (expands) expand(tile, groups, expanded);
    if (w->bits == 4 && !expands) {
        for (; row + ROWS <= rows; row += ROWS) gemm_rows(w, tile, t * TILE, x, row, ROWS, 4, NEXT(ROWS), y, add);
        for (; row < rows; row++) gemm_rows(w, tile, t * TILE, x, row, 1, 4, NEXT(1), y, add);
    } else {
        if (expands) tile = expanded;
        for (; row + ROWS <= rows; row += ROWS) gemm_rows(w, tile, t * TILE, x, row, ROWS, 8, NEXT(ROWS), y, add);
        for (; row < rows; row++) gemm_rows(w, tile, t * TILE, x, row, 1, 8, NEXT(1), y, add);
    }
#undef NEXT
}
