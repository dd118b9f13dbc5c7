/* Elements of vectors with AVX-512: the bits of elements_cpu.h and blocks_cpu.h, 16 or 32 at a
 * time.
 *
 * gcc vectorizes the loops over single elements, with more instructions. `some` has a bit for each
 * element that there is.
 */
#ifndef MEGAFP8_ELEMENTS_AVX512_H
#define MEGAFP8_ELEMENTS_AVX512_H

#include "elements_cpu.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#include <immintrin.h>

#define ALL_OF(x) _mm512_set1_epi32(x)
#define INTEGERS(x) _mm512_castps_si512(x)
#define FLOATS(x) _mm512_castsi512_ps(x)

INLINE __m512 load_512(const void *x, size_t i, int kind, __mmask16 some) {
    if (kind == F32) return _mm512_maskz_loadu_ps(some, (const float *)x + i);
    __m256i raw = _mm256_maskz_loadu_epi16(some, (const uint16_t *)x + i);
    if (kind == F16) return _mm512_cvtph_ps(raw);
    return FLOATS(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

/* The last byte of each code with the sign of x. */
INLINE __m128i with_sign(__m512i code, __m512 x) {
    __m512i sign = _mm512_srli_epi32(INTEGERS(x), 24);
    return _mm512_cvtepi32_epi8(_mm512_ternarylogic_epi32(code, sign, ALL_OF(0x80), 0xd8));
}

INLINE __m512 magnitude_512(__m512 x) {
    return FLOATS(_mm512_and_si512(INTEGERS(x), ALL_OF(0x7fffffff)));
}

INLINE __m512i exponent_512(__m512 x, int least) {
    __m512i e = _mm512_and_si512(INTEGERS(x), ALL_OF(0x7f800000));
    return _mm512_max_epi32(e, ALL_OF(least << 23));
}

/* FP8 codes of magnitudes, in the last bytes, of which none is NaN or rounds to one above the
 * format's largest number; and the numbers that they stand for.
 * The sum's last byte is k of elements_cpu.h less that of emin, which is even and so changes no
 * tie; the bits of the exponent are added to it. */
INLINE __m512i codes_512(__m512 y, int format, __m512 *number) {
    const int mb = format == E4M3 ? 3 : 2, least = format == E4M3 ? 127 - 6 : 127 - 14;
    const int magic = ((23 - mb) << 23 | 0x400000) - (least << mb);
    __m512i e = exponent_512(y, least);
    __m512 large = FLOATS(_mm512_add_epi32(e, ALL_OF(magic))), sum = _mm512_add_ps(y, large);
    *number = _mm512_sub_ps(sum, large);
    return _mm512_add_epi32(INTEGERS(sum), _mm512_srli_epi32(e, 23 - mb));
}

/* The same of x * factor, with signs, and the magnitudes of the numbers. */
INLINE __m128i encode_512(__m512 x, __m512 factor, int format, __m512 *number) {
    return with_sign(codes_512(_mm512_mul_ps(magnitude_512(x), factor), format, number), x);
}

/* `fp4_code` of 16 elements without NaN, with their random bytes or none, and their magnitudes. */
INLINE __m128i fp4_512(__m512 x, __m512 factor, int is_random, __m128i bytes, __m512 *number) {
    __m512 a = _mm512_mul_ps(magnitude_512(x), factor);
    if (is_random) {
        __m512 step = FLOATS(_mm512_sub_epi32(exponent_512(a, 127), ALL_OF(9 << 23)));
        __m512 byte = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
        a = _mm512_add_ps(a, _mm512_mul_ps(byte, step));
    }
    a = _mm512_min_ps(a, _mm512_set1_ps(6.0f));
    __m512i step = _mm512_sub_epi32(exponent_512(a, 127), ALL_OF(1 << 23));
    __m512 large = FLOATS(_mm512_add_epi32(step, ALL_OF(23 << 23 | 0x400000)));
    __m512 near = _mm512_sub_ps(_mm512_add_ps(a, large), large);
    if (is_random) {
        __mmask16 is_above = _mm512_cmp_ps_mask(near, a, _CMP_GT_OQ);
        near = _mm512_mask_sub_ps(near, is_above, near, FLOATS(step));
    }
    *number = near;
    __m512i code = _mm512_max_epi32(_mm512_srli_epi32(INTEGERS(near), 20), ALL_OF(120 << 3));
    return with_sign(_mm512_sub_epi32(code, ALL_OF(120 << 3)), x);
}

#define WORDS(x) _mm512_set1_epi16((short)(x))

INLINE __m512i words_with_sign(__m512i magnitude, __m512i codes) {
    return _mm512_ternarylogic_epi32(magnitude, codes, WORDS(0x8000), 0xd8);
}

/* The cast of 32 numbers in BF16 by a finite scale above zero. Of each two neighbours the first goes
 * into one vector of FP32, the second into another. */
INLINE void quantize_512(__m512i x, __m512 scale, int format, __mmask32 some, uint8_t *payload,
                         uint16_t *grid) {
    const __m512 max = _mm512_set1_ps(format == E4M3 ? 448.0f : 57344.0f);
    __m512i m = _mm512_and_si512(x, WORDS(0x7fff));
    __m512 first = FLOATS(_mm512_slli_epi32(m, 16));
    __m512 second = FLOATS(_mm512_and_si512(m, ALL_OF((int)0xffff0000u))), low, high;
    __m512i code = codes_512(_mm512_min_ps(_mm512_mul_ps(first, scale), max), format, &low);
    __m512i next = codes_512(_mm512_min_ps(_mm512_mul_ps(second, scale), max), format, &high);
    code = _mm512_mask_blend_epi16(0xaaaaaaaau, code, _mm512_slli_epi32(next, 16));
    __m512i number = _mm512_or_si512(_mm512_srli_epi32(INTEGERS(low), 16), INTEGERS(high));
    const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(m, WORDS(0x7f80));
    if (is_nan) {
        code = _mm512_mask_mov_epi16(code, is_nan, WORDS(0x7f));
        number = _mm512_mask_mov_epi16(number, is_nan, WORDS(0x7fc0));
    }
    code = _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(x, 8), WORDS(0x80), 0xd8);
    _mm256_mask_storeu_epi8(payload, some, _mm512_cvtepi16_epi8(code));
    if (grid) _mm512_mask_storeu_epi16(grid, some, words_with_sign(number, x));
}

/* The magnitudes of 32 numbers of E4M3 in BF16, without NaN; `codes` are extended by their signs.
 */
INLINE __m512i decode_512(__m512i codes) {
    const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(
        0, 118 << 7, 119 << 7, (119 << 7) + 64, 120 << 7, (120 << 7) + 32, (120 << 7) + 64,
        (120 << 7) + 96)); /* 0 to 7 times the smallest number, 2^-9 */
    __m512i m = _mm512_and_si512(codes, WORDS(0x7f));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(m, 4), WORDS(120 << 7));
    return _mm512_mask_permutexvar_epi16(bits, _mm512_cmplt_epi16_mask(m, WORDS(8)), m, small);
}

INLINE __mmask32 is_nan_of_e4m3(__m512i codes) {
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(codes, WORDS(0x7f)), WORDS(0x7f));
}

INLINE __m256i to_bf16_512(__m512 x) {
    __m512i bits = INTEGERS(x), high = _mm512_srli_epi32(bits, 16);
    __m512i up = _mm512_add_epi32(_mm512_and_si512(high, ALL_OF(1)), ALL_OF(0x7fff));
    __m512i code = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(code, is_nan, ALL_OF(0x7fc0)));
}
#else
#define HAS_AVX512 0
#endif

#endif
