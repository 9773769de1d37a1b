/* What gcc and clang spell differently, and the attributes of functions and arrays.

   Code elsewhere uses only extensions that both have: vector types, __builtin_convertvector, and variable-length
   arrays. Lane permutations, for which they have different functions, are in `vectors.h`. */

#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64))) /* to a cache line: vectors that cross one take twice as long */

/* Before a loop: unrolls it that many times, which is all of it except with UNROLL_PART. Arrays of vectors stay in
   registers only if all indices into them are constants, in every loop over the array. clang decides that early, when
   it has unrolled loops completely but none in part. */
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define UNROLL(times) PRAGMA(clang loop unroll(full))
#define UNROLL_PART(times) PRAGMA(clang loop unroll_count(times))
#else
#define UNROLL(times) PRAGMA(GCC unroll times)
#define UNROLL_PART(times) UNROLL(times)
#endif

INLINE int64_t max2(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t min2(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; } /* to a cache line */
