/* FP8 casts for CPUs: one pass over memory each.
 *
 * quantize: payload = round_to_fp8(clamp(x * scale)), the same values in BF16 (the "grid", for a
 * BF16 GEMM), and amax = max(amax, max|x|); optionally column sums of x (a bias gradient).
 * decode: FP8 bytes back to the BF16 grid.
 * accumulate: a BF16 gradient into its FP32 sum.
 *
 * Rounding without a cast instruction: for |y| <= MAX let e = max(exponent(y), EMIN). Adding
 * M = 1.5 * 2^(e + 23 - MB) puts the last FP8 mantissa bit at the last FP32 mantissa bit, so the
 * FP32 addition itself rounds to nearest, ties to even; bits(|y| + M) - bits(M) is the integer
 * significand k, and ((e - EMIN) << MB) + k the FP8 code, subnormals and carries included.
 * Must be compiled without unsafe floating-point flags.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define SERIAL_BELOW 65536 /* elements; a thread team costs more than it brings below this */

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum { E4M3 = 0, E5M2 = 1 };

INLINE float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, m = h & 0x7fff;
    uint32_t normal = (m << 13) + (112u << 23);
    uint32_t special = (m << 13) | 0x7f800000u;
    uint32_t subnormal = as_bits((float)(int32_t)m * 0x1p-24f);
    uint32_t bits = m >= 0x7c00 ? special : normal;
    return as_float(sign | (m < 0x400 ? subnormal : bits));
}

INLINE float load(const void *x, size_t i, int kind) {
    if (kind == F32) return ((const float *)x)[i];
    if (kind == BF16) return as_float((uint32_t)((const uint16_t *)x)[i] << 16);
    return half_to_float(((const uint16_t *)x)[i]);
}

/* One element. Returns the FP8 code and, through grid, the BF16 bits of the same number. */
INLINE uint8_t encode(float x, float scale, int format, uint16_t *grid) {
    const uint32_t mb = format == E4M3 ? 3 : 2;
    const uint32_t emin = (format == E4M3 ? 127 - 6 : 127 - 14) << 23;
    const float max = format == E4M3 ? 448.0f : 57344.0f;
    uint32_t bits = as_bits(x * scale), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t is_nan = magnitude > 0x7f800000u;
    float y = as_float(magnitude);
    y = y < max ? y : max;
    uint32_t e = as_bits(y) & 0x7f800000u;
    e = e > emin ? e : emin;
    float m = as_float(e + (((23 - mb) << 23) | 0x400000u));
    float sum = y + m;
    uint32_t k = as_bits(sum) - as_bits(m);
    uint32_t code = ((e - emin) >> (23 - mb)) + k;
    uint32_t value = as_bits(sum - m);
    code = is_nan ? 0x7f : code;
    value = is_nan ? 0x7fc00000u : value;
    *grid = (uint16_t)((value | sign) >> 16);
    return (uint8_t)(code | (sign >> 24));
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

/* max|x| as FP32 bits: magnitudes of floats order like integers, and NaN above infinity. */
INLINE uint32_t quantize_span(const void *restrict x, size_t begin, size_t end, float scale,
                              uint8_t *restrict payload, uint16_t *restrict grid,
                              float *restrict column_sum, int kind, int format) {
    uint32_t amax = 0;
    for (size_t i = begin; i < end; i++) {
        float v = load(x, i, kind);
        uint32_t magnitude = as_bits(v) & 0x7fffffffu;
        uint16_t g;
        amax = magnitude > amax ? magnitude : amax;
        payload[i] = encode(v, scale, format, &g);
        if (grid) grid[i] = g;
        if (column_sum) column_sum[i - begin] += v;
    }
    return amax;
}

/* Constant kind and format, and known NULLs, make each call its own vectorized loop. */
INLINE uint32_t quantize_any(const void *x, size_t begin, size_t end, float scale,
                             uint8_t *payload, uint16_t *grid, float *column_sum, int kind,
                             int format) {
#define SPAN(K, F)                                                                          \
    (column_sum ? (grid ? quantize_span(x, begin, end, scale, payload, grid, column_sum, K, F)    \
                        : quantize_span(x, begin, end, scale, payload, NULL, column_sum, K, F))   \
                : (grid ? quantize_span(x, begin, end, scale, payload, grid, NULL, K, F)          \
                        : quantize_span(x, begin, end, scale, payload, NULL, NULL, K, F)))
    if (format == E4M3)
        return kind == F32 ? SPAN(F32, E4M3) : kind == BF16 ? SPAN(BF16, E4M3) : SPAN(F16, E4M3);
    return kind == F32 ? SPAN(F32, E5M2) : kind == BF16 ? SPAN(BF16, E5M2) : SPAN(F16, E5M2);
#undef SPAN
}

INLINE void store_amax(float *amax, uint32_t bits) {
    float seen = as_float(bits > 0x7f800000u ? 0x7f800000u : bits);
    if (seen > *amax) *amax = seen;
}

/* Work for one of `threads` parts of n, in whole cache lines of bytes. */
INLINE void share(size_t n, int threads, int t, size_t *begin, size_t *end) {
    size_t step = ((n / threads + 64) / 64) * 64;
    *begin = (size_t)t * step < n ? (size_t)t * step : n;
    *end = *begin + step < n ? *begin + step : n;
}

/* amax may be NULL: then nothing is recorded (evaluation, recomputation). */
void megafp8_quantize(const void *x, size_t n, int kind, int format, const float *quant_scale,
                      uint8_t *payload, uint16_t *grid, float *amax, int threads) {
    const float scale = *quant_scale;
    uint32_t all = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        uint32_t bits = quantize_any(x, begin, end, scale, payload, grid, NULL, kind, format);
        all = bits > all ? bits : all;
    }
    if (amax) store_amax(amax, all);
}

/* The same for a matrix, which also adds each column up, in FP32 and in the order of the rows
 * whatever the number of threads: they share the columns. column_sum is written, [cols]. */
void megafp8_quantize_and_sum(const void *x, size_t rows, size_t cols, int kind, int format,
                              const float *quant_scale, uint8_t *payload, uint16_t *grid,
                              float *amax, float *column_sum, int threads) {
    const float scale = *quant_scale;
    uint32_t all = 0;
    if (rows * cols < SERIAL_BELOW) threads = 1;
    memset(column_sum, 0, cols * sizeof(float));
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(cols, threads, t, &begin, &end);
        for (size_t row = 0; row < rows && begin < end; row++) {
            size_t at = row * cols;
            uint32_t bits = quantize_any(x, at + begin, at + end, scale, payload, grid,
                                         column_sum + begin, kind, format);
            all = bits > all ? bits : all;
        }
    }
    if (amax) store_amax(amax, all);
}

INLINE void decode_span(const uint8_t *payload, size_t begin, size_t end, uint16_t *grid, int format) {
    for (size_t i = begin; i < end; i++) grid[i] = decode_one(payload[i], format);
}

void megafp8_decode(const uint8_t *payload, size_t n, int format, uint16_t *grid, int threads) {
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        if (format == E4M3) decode_span(payload, begin, end, grid, E4M3);
        else decode_span(payload, begin, end, grid, E5M2);
    }
}

/* sum += x for a gradient in BF16 and its FP32 sum: one pass, where torch makes two. */
void megafp8_accumulate(float *restrict sum, const uint16_t *restrict x, size_t n, int threads) {
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        for (size_t i = begin; i < end; i++) sum[i] += as_float((uint32_t)x[i] << 16);
    }
}
