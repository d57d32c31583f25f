/* Weights while a model is loaded: to bytes as ReferenceInt8.quantize_weight has them, bit by bit, and bytes to panels.
 * Called by several threads at once, each with weights of its own. */

#include <float.h>
#include <math.h>
#include <string.h>

#include "panels.h"

/* Turns a row in blocks, the last of which may be shorter: what it becomes goes to `turned`, which may be the row. */
static void turn_row(const float *row, long width, float *turned)
{
    for (long at = 0; at < width; at += TURNED) {
        __m512 block[BLOCK_REGISTERS];
        load_block(row + at, width - at, block);
        turn_four(block);
        for (int i = 0; i < BLOCK_REGISTERS; i++)
            _mm512_storeu_ps(turned + at + 16 * i, _mm512_mul_ps(block[i], _mm512_set1_ps(TURNED_FACTOR)));
    }
}

void batchinfer_quantize_weight_row(const float *row, long width, float *turned, int8_t *values, int8_t *fine,
                                    float *scale)
{
    const long padded = padded_to_blocks(width);
    __m512i most = _mm512_setzero_si512();
    turn_row(row, width, turned);
    for (long k = 0; k < padded; k += 16)
        most = larger_bits(most, _mm512_loadu_ps(turned + k));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    if (bits >= BITS_OF_INFINITY) {
        *scale = NAN;
        memset(values, 0, padded);
        if (fine)
            memset(fine, 0, padded);
        return;
    }
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    *scale = largest / MOST;
    if (*scale < FLT_MIN)
        *scale = 0; /* too coarse a number to divide by */
    const __m512 factor = _mm512_set1_ps(*scale == 0 ? 0.0f : MOST / largest);
    for (long k = 0; k < padded; k += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(turned + k), factor);
        const __m512i whole = _mm512_cvtps_epi32(scaled);
        _mm_storeu_si128((void *)(values + k), _mm512_cvtepi32_epi8(whole));
        if (!fine)
            continue;
        const __m512 left = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(whole));
        const __m512i finer = _mm512_cvtps_epi32(_mm512_mul_ps(left, _mm512_set1_ps(FINER)));
        _mm_storeu_si128((void *)(fine + k), _mm512_cvtepi32_epi8(finer));
    }
}

/* rows float32 [count, width] to values int8 [count, padded], fine, the same or NULL, and scales float32 [count];
 * scratch: float32 [padded]. */
void batchinfer_quantize_weight(const float *rows, long count, long width, int8_t *values, int8_t *fine, float *scales,
                                float *scratch)
{
    const long padded = padded_to_blocks(width);
    for (long n = 0; n < count; n++)
        batchinfer_quantize_weight_row(rows + n * width, width, scratch, values + n * padded,
                                       fine ? fine + n * padded : NULL, scales + n);
}

/* `length` inputs of sixteen features, int8 [16, width], to a half of a panel; minus ZERO times their sums. */
static __m512i pack_group(const int8_t *values, long width, long length, char *to)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)(width / 4)));
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    for (long k = 0; k < length; k += 4) {
        const __m512i four = _mm512_i32gather_epi32(rows, values + k, 4);
        _mm512_storeu_si512(to + k * PANEL, four);
        sum = _mm512_dpbusd_epi32(sum, ones, four);
    }
    return _mm512_mullo_epi32(sum, _mm512_set1_epi32(-ZERO));
}

/* Sixteen features, `values` int8 [16, width], `fine`, the same or NULL, and `scales` [16], to a panel's first half,
 * or, where `to` is 64 bytes on, to its second. */
static void pack_half(const int8_t *values, const int8_t *fine, const float *scales, long width, char *to)
{
    const long group = group_of(width), begins = fine ? 2 * VECTOR : VECTOR;
    _mm512_storeu_ps(to, _mm512_loadu_ps(scales));
    to += VECTOR;
    for (long at = 0; at < width; at += group) {
        const long length = least(group, width - at);
        const __m512i begin = pack_group(values + at, width, length, to + begins);
        _mm512_storeu_si512(to, begin);
        if (fine) {
            const __m512i finer = pack_group(fine + at, width, length, to + begins + length * PANEL);
            _mm512_storeu_si512(to + VECTOR, _mm512_add_epi32(begin, finer));
        }
        to += begins + length * PANEL * (fine ? 2 : 1);
    }
}

/* Panels of bytes as panels.h has them. The first half of panel p are 16 rows of `low` int8 [, width] from row p * step
 * on, with their scales float32; the second half are those of `high`. Whole blocks. */
void batchinfer_pack_panels(const int8_t *low, const float *low_scales, const int8_t *high, const float *high_scales,
                            long step, long panels, long width, char *bytes)
{
    for (long p = 0; p < panels; p++, bytes += panel_bytes(width)) {
        const long row = p * step;
        pack_half(low + row * width, NULL, low_scales + row, width, bytes);
        pack_half(high + row * width, NULL, high_scales + row, width, bytes + 64);
    }
}

/* Fine panels, each of PANEL rows of values and of fine int8 [, width], and of scales float32. Whole blocks. */
void batchinfer_pack_fine_panels(const int8_t *values, const int8_t *fine, const float *scales, long panels, long width,
                                 char *bytes)
{
    for (long p = 0; p < 2 * panels; p++) {
        const long row = p * PANEL / 2;
        pack_half(values + row * width, fine + row * width, scales + row, width,
                  bytes + p / 2 * fine_panel_bytes(width) + p % 2 * 64);
    }
}
