/* Products of pairs of bfloat16 and of fours of bytes in 512-bit registers, and the functions of attention's softmax. */

#ifndef BATCHINFER_BF16_H
#define BATCHINFER_BF16_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* Lane i: sum + a[2i+1] b[2i+1] + a[2i] b[2i], in float32, each addition rounded (vdpbf16ps, or as near to it as the
 * processor comes: that instruction takes denormals as zero). */
INLINE __m512 dot_pairs(__m512 sum, __m512i a, __m512i b)
{
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000u);
    sum = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, upper), (__m512)_mm512_and_si512(b, upper), sum);
    return _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
#endif
}

/* Lane i: sum + bytes 4i .. 4i + 3 of a, unsigned, times those of b, signed. With the compiler's own name for the
 * instruction it kept sums in memory, or copied them in loops. */
INLINE __m512i dot_fours(__m512i sum, __m512i a, __m512i b)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

#ifndef __AVX512BF16__
/* Rounded to nearest even, in the lower halves of the lanes. NaN stays NaN. */
INLINE __m512i round_to_bf16(__m512 x)
{
    const __m512i bits = (__m512i)x;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7FC0));
}
#endif

/* 32 numbers, `first` in elements 0 to 15, rounded to nearest even. */
INLINE __m512i to_bf16(__m512 first, __m512 second)
{
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
#else
    const __m256i low = _mm512_cvtepi32_epi16(round_to_bf16(first));
    const __m256i high = _mm512_cvtepi32_epi16(round_to_bf16(second));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#endif
}

/* 2^x within 2 units in the last place; zero below 2^-150, NaN for NaN. (Polynomial: Cephes' exp2f.) */
INLINE __m512 exp2_of(__m512 x)
{
    /* The bounds come first: of an unordered pair, min and max give the second. */
    x = _mm512_max_ps(_mm512_set1_ps(-151.0f), x);
    x = _mm512_min_ps(_mm512_set1_ps(128.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.535336188319500e-4f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.339887440266574e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.618437357674640e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.550332471162809e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.402264791363012e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.931472028550421e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* tanh within 2e-7. */
INLINE __m512 tanh_of(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    const __m512 power = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(2.885390081777927f))); /* e^2x */
    return _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(power, one)));
}

#endif
