/* Rows of float32 numbers: dot products, norms and RoPE.

   Sums are in an order that depends on the count alone, and compilers may not change it (no -ffast-math): a token's
   result has the same bits whatever else is in the batch. */

#pragma once

#include "compiler.h"

INLINE float dot(const float *x, const float *y, int64_t count) {
    float lanes[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j] * y[i + j];
    for (int j = 0; j < 16; j++) total += lanes[j];
    for (; i < count; i++) total += x[i] * y[i];
    return total;
}

/* 1 / root mean square */
INLINE float inverse_rms(const float *x, int64_t count, float eps) {
    return 1.0f / sqrtf(dot(x, x, count) / (float)count + eps);
}

INLINE void norm_row(const float *x, const float *weight, int64_t count, float eps, float *out) {
    float factor = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * factor * weight[i];
}

/* RoPE of one head, in place. cos_sin: of its position, all cosines first. */
INLINE void rotate(float *x, const float *cos_sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float real = x[i], imaginary = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = real * c - imaginary * s;
        x[half + i] = imaginary * c + real * s;
    }
}
