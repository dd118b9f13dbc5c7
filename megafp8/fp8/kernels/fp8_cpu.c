/* FP8 casts for CPUs: one pass over memory each.
 *
 * quantize: payload = round_to_fp8(clamp(x * scale)), the same values in FP32 or BF16 (the "grid",
 * for a GEMM in that format), and amax = max(amax, max|x|); optionally column sums of x (a bias
 * gradient).
 * decode: FP8 bytes back to the grid.
 * accumulate: a BF16 gradient into its FP32 sum.
 * scaled_adam, scaled_sum: over tensors stored in low precision (scaled_cpu.h).
 *
 * Rounding without a cast instruction: for |y| <= MAX let e = max(exponent(y), EMIN). Adding
 * M = 1.5 * 2^(e + 23 - MB) puts the last FP8 mantissa bit at the last FP32 mantissa bit, so the
 * FP32 addition itself rounds to nearest, ties to even; bits(|y| + M) - bits(M) is the integer
 * significand k, and ((e - EMIN) << MB) + k the FP8 code, subnormals and carries included.
 * Must be compiled without flags that let the compiler reassociate. -fno-trapping-math is not one of
 * them, and without it gcc vectorizes no loop that compares floats. Signed integers are compared, as
 * SSE2 has no unsigned comparison.
 */
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

/* max|x| as FP32 bits: magnitudes of floats order like integers, and NaN above infinity. */
INLINE int32_t quantize_span(const void *restrict x, size_t begin, size_t end, float scale,
                             uint8_t *restrict payload, void *restrict grid,
                             float *restrict column_sum, int kind, int format, int grid_kind) {
    int32_t amax = 0;
#pragma GCC ivdep /* payload, grid and column_sum are tensors of their own */
    for (size_t i = begin; i < end; i++) {
        float v = load(x, i, kind);
        int32_t magnitude = (int32_t)(as_bits(v) & 0x7fffffffu);
        uint32_t number;
        amax = magnitude > amax ? magnitude : amax;
        payload[i] = encode(v, scale, format, &number);
        put(grid, i, grid_kind, number);
        if (column_sum) column_sum[i - begin] += v;
    }
    return amax;
}

/* Constant kinds and format make each call its own vectorized loop. A grid in BF16 is for BF16
 * products, and their tensors are in BF16: the other kinds have a grid in FP32 or none. */
#define SPAN(K, F, SUM, G) quantize_span(x, begin, end, scale, payload, grid, SUM, K, F, G)

static int32_t quantize_any(const void *x, size_t begin, size_t end, float scale, uint8_t *payload,
                            void *grid, int kind, int format, int grid_kind) {
#define OR_NONE(K, F) (grid_kind == NONE ? SPAN(K, F, NULL, NONE) : SPAN(K, F, NULL, F32))
#define OF_KIND(F)                                                                                 \
    (kind == F32         ? OR_NONE(F32, F)                                                         \
     : kind == F16       ? OR_NONE(F16, F)                                                         \
     : grid_kind == BF16 ? SPAN(BF16, F, NULL, BF16)                                               \
                         : OR_NONE(BF16, F))
    return format == E4M3 ? OF_KIND(E4M3) : OF_KIND(E5M2);
#undef OF_KIND
#undef OR_NONE
}

static __attribute__((nonnull)) int32_t sum_any(const void *x, size_t begin, size_t end,
                                                float scale, uint8_t *payload, void *grid,
                                                float *column_sum, int kind, int format,
                                                int grid_kind) {
#define OF_KIND(F)                                                                                 \
    (kind == F32         ? SPAN(F32, F, column_sum, F32)                                           \
     : kind == F16       ? SPAN(F16, F, column_sum, F32)                                           \
     : grid_kind == BF16 ? SPAN(BF16, F, column_sum, BF16)                                         \
                         : SPAN(BF16, F, column_sum, F32))
    return format == E4M3 ? OF_KIND(E4M3) : OF_KIND(E5M2);
#undef OF_KIND
}
#undef SPAN

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

/* amax may be NULL: then nothing is recorded (evaluation, recomputation). grid_kind: F32, NONE, or
 * BF16 where x is in BF16. */
void megafp8_quantize(const void *x, size_t n, int kind, int format, const float *quant_scale,
                      uint8_t *payload, void *grid, int grid_kind, float *amax, int threads) {
    const float scale = *quant_scale;
    int32_t all = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        int32_t bits = quantize_any(x, begin, end, scale, payload, grid, kind, format, grid_kind);
        all = bits > all ? bits : all;
    }
    if (amax) store_amax(amax, all);
}

/* The same for a matrix and with a grid, which also adds each column up, in FP32 and in the order of the rows
 * whatever the number of threads: they share the columns. column_sum is written, [cols]. */
void megafp8_quantize_and_sum(const void *x, size_t rows, size_t cols, int kind, int format,
                              const float *quant_scale, uint8_t *payload, void *grid,
                              int grid_kind, float *amax, float *column_sum, int threads) {
    const float scale = *quant_scale;
    int32_t all = 0;
    if (rows * cols < SERIAL_BELOW) threads = 1;
    memset(column_sum, 0, cols * sizeof(float));
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(cols, threads, t, &begin, &end);
        for (size_t row = 0; row < rows && begin < end; row++) {
            size_t at = row * cols;
            int32_t bits = sum_any(x, at + begin, at + end, scale, payload, grid,
                                   column_sum + begin, kind, format, grid_kind);
            all = bits > all ? bits : all;
        }
    }
    if (amax) store_amax(amax, all);
}

INLINE void decode_span(const uint8_t *restrict payload, size_t begin, size_t end,
                        void *restrict grid, int format, int grid_kind) {
#pragma GCC ivdep
    for (size_t i = begin; i < end; i++)
        put(grid, i, grid_kind, (uint32_t)decode_one(payload[i], format) << 16);
}

void megafp8_decode(const uint8_t *payload, size_t n, int format, void *grid, int grid_kind,
                    int threads) {
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        if (format == E4M3 && grid_kind == F32) decode_span(payload, begin, end, grid, E4M3, F32);
        else if (format == E4M3) decode_span(payload, begin, end, grid, E4M3, BF16);
        else if (grid_kind == F32) decode_span(payload, begin, end, grid, E5M2, F32);
        else decode_span(payload, begin, end, grid, E5M2, BF16);
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

#include "blocks_cpu.h"
#include "draws_cpu.h"
#include "scaled_cpu.h"

/* Whether the functions above use the threads that they are given. */
int megafp8_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
