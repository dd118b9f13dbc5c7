/* Single elements: number formats, and what all kernels for CPUs share.
 *
 * Rounding without a cast instruction: for |y| <= MAX let e = max(exponent(y), EMIN). Adding
 * M = 1.5 * 2^(e + 23 - MB) puts the last FP8 mantissa bit at the last FP32 mantissa bit, so the
 * FP32 addition itself rounds to nearest, ties to even; bits(|y| + M) - bits(M) is the integer
 * significand k, and ((e - EMIN) << MB) + k the FP8 code, subnormals and carries included.
 * Must be compiled without flags that let the compiler reassociate. -fno-trapping-math is not one of
 * them, and without it gcc vectorizes no loop that compares floats. Signed integers are compared, as
 * SSE2 has no unsigned comparison.
 */
#ifndef MEGAFP8_ELEMENTS_CPU_H
#define MEGAFP8_ELEMENTS_CPU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define SERIAL_BELOW 65536 /* elements; a thread team costs more than it brings below this */

enum { F32 = 0, BF16 = 1, F16 = 2, NONE = 3 }; /* of x; of the grid: F32, BF16 or NONE */
enum { E4M3 = 0, E5M2 = 1 };

INLINE float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

INLINE float half_to_float(uint16_t h) {
    int32_t m = h & 0x7fff;
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, shifted = (uint32_t)m << 13;
    uint32_t normal = shifted + (112u << 23), special = shifted | 0x7f800000u;
    uint32_t subnormal = as_bits((float)m * 0x1p-24f);
    uint32_t bits = m >= 0x7c00 ? special : normal;
    return as_float(sign | (m < 0x400 ? subnormal : bits));
}

INLINE float load(const void *x, size_t i, int kind) {
    if (kind == F32) return ((const float *)x)[i];
    if (kind == BF16) return as_float((uint32_t)((const uint16_t *)x)[i] << 16);
    return half_to_float(((const uint16_t *)x)[i]);
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((int32_t)magnitude > 0x7f800000 ? 0x7fc0u : rounded);
}

/* One element. Returns the FP8 code and, through number, the FP32 bits of the same number. */
INLINE uint8_t encode(float x, float scale, int format, uint32_t *number) {
    const int32_t mb = format == E4M3 ? 3 : 2;
    const int32_t emin = (format == E4M3 ? 127 - 6 : 127 - 14) << 23;
    const float max = format == E4M3 ? 448.0f : 57344.0f;
    uint32_t bits = as_bits(x * scale), sign = bits & 0x80000000u;
    int32_t magnitude = (int32_t)(bits ^ sign), is_nan = magnitude > 0x7f800000;
    float y = as_float((uint32_t)magnitude);
    y = y < max ? y : max;
    int32_t e = (int32_t)(as_bits(y) & 0x7f800000u);
    e = e > emin ? e : emin;
    float m = as_float((uint32_t)e + (((uint32_t)(23 - mb) << 23) | 0x400000u));
    float sum = y + m;
    uint32_t k = as_bits(sum) - as_bits(m);
    uint32_t code = ((uint32_t)(e - emin) >> (23 - mb)) + k;
    uint32_t value = as_bits(sum - m);
    code = is_nan ? 0x7f : code;
    value = is_nan ? 0x7fc00000u : value;
    *number = value | sign;
    return (uint8_t)(code | (sign >> 24));
}

INLINE void put(void *grid, size_t i, int kind, uint32_t number) {
    if (kind == F32) ((float *)grid)[i] = as_float(number);
    if (kind == BF16) ((uint16_t *)grid)[i] = (uint16_t)(number >> 16);
}

/* In 16-bit integers throughout, so that one vector holds 32 elements. */
INLINE uint16_t decode_one(uint8_t code, int format) {
    const uint16_t mb = format == E4M3 ? 3 : 2;
    const uint16_t rebias = (format == E4M3 ? 127 - 7 : 127 - 15) << 7;
    const uint16_t one = (format == E4M3 ? 127 - 9 : 127 - 16) << 7; /* the smallest subnormal */
    uint16_t sign = (uint16_t)(code & 0x80) << 8, m = code & 0x7f;
    uint16_t normal = (uint16_t)((m << (7 - mb)) + rebias);
    uint16_t subnormal = m >= 4   ? (uint16_t)(one + 256 + ((m - 4) << 5))
                         : m >= 2 ? (uint16_t)(one + 128 + ((m - 2) << 6))
                                  : (uint16_t)(m ? one : 0);
    uint16_t bits = m < (1 << mb) ? subnormal : normal;
    if (format == E4M3) bits = m == 0x7f ? 0x7fc0 : bits;
    else bits = m > 0x7c ? 0x7fc0 : (m == 0x7c ? 0x7f80 : bits);
    return bits | sign;
}

INLINE void store_amax(float *amax, int32_t bits) {
    float seen = as_float((uint32_t)(bits > 0x7f800000 ? 0x7f800000 : bits));
    if (seen > *amax) *amax = seen;
}

/* Work for one of `threads` parts of n, in whole cache lines of bytes. */
INLINE void share(size_t n, int threads, int t, size_t *begin, size_t *end) {
    size_t step = ((n / threads + 64) / 64) * 64;
    *begin = (size_t)t * step < n ? (size_t)t * step : n;
    *end = *begin + step < n ? *begin + step : n;
}

#endif
