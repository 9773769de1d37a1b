/* Matrices: quantized weights and how they are packed, and inputs rounded to 15 bits.

   Weights stay in 4 or 8 bits: w = scale * q + offset, with one scale and one offset per group of 32 columns. The
   input of a matrix is rounded to 15 bits per group of 32, in two bytes, so that the sum of a group is one of
   integers and exact. This changes outputs no more than float32 itself does; 8 bits would change them visibly.

   Only pack(), gather_row() and the GEMMs know the layout of a block: change them together. `Matrix` is also declared
   in native.py. */

#pragma once

#include "threads.h"
#include "vectors.h"

#define GROUP 32      /* columns with one scale */
#define LARGEST 16256 /* 127 * 128: an input after rounding */
#define STEPS 8       /* of 4 columns each, in a group */

typedef struct {
    const uint8_t *data; /* see pack() */
    const float *bias;   /* or NULL */
    int32_t rows, columns, bits, unused;
} Matrix;

typedef struct { /* the rows of a batch, rounded to 15 bits: x = scale * (128 * high + low); WORDS: see vectors.h */
    int8_t *high, *low;
    float *scales, *sums; /* [rows, groups]; a sum is that of the rounded inputs of a group */
    int64_t columns;      /* a multiple of GROUP: inputs after the last one are zero */
} Rounded;

INLINE int64_t groups_of(int64_t columns) { return (columns + GROUP - 1) / GROUP; }
INLINE int64_t tiles_of(const Matrix *w) { return (w->rows + TILE - 1) / TILE; }
INLINE int64_t block_bytes(int bits) { return TILE * 4 + TILE * GROUP * bits / 8; }

const char *isa(void) { return ISA; }

int64_t packed_bytes(int64_t rows, int64_t columns, int32_t bits) {
    return (rows + TILE - 1) / TILE * groups_of(columns) * block_bytes(bits);
}

static uint16_t to_float16(float x) {
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

/* Arranges a matrix by tiles of TILE rows (channels), in each by groups of columns. A block has the scales and the
   offsets of all channels as float16, then the values, by steps of 4 columns. Two steps of 4-bit values share bytes.
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
            halves[lane] = to_float16(scale);
            halves[TILE + lane] = to_float16(offset);
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

/* Rounds some groups of one row of inputs. A value that is not finite makes all of its group NaN. */
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

/* out = scale * one row of a matrix. */
static void gather_row(const Matrix *w, int64_t row, float scale, float *out) {
    int64_t groups = groups_of(w->columns), lane = row % TILE, vec = lane / LANES, in_vec = lane % LANES;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *block = w->data + (row / TILE * groups + g) * block_bytes(w->bits);
        const uint16_t *halves = (const uint16_t *)block;
        float step = load_float16(halves + vec * LANES)[in_vec];
        float offset = load_float16(halves + TILE + vec * LANES)[in_vec];
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

