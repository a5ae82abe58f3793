// Attention with dropout inside packed windows, dropout + residual + layer norm (fp32, bf16), and linear layers (bf16),
// for CPUs with AVX-512 and AMX. fused.py is the interface.
//
// A window's scores stay in the CPU's cache. Of the probabilities, one bit per pair of tokens is kept for the backward
// pass, which computes them again (as in Dao et al. 2022, arXiv:2205.14135). Products are torch's brgemm, which adds in
// fp32. On operands at addresses that are no multiple of 64 bytes it takes four times as long.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {
using at::BFloat16;
using at::Tensor;
namespace blas = at::native::cpublas;
using Lanes = __m512;  // 16 numbers, with the compiler's operators

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 32;  // rows and columns are padded to it in scratch memory, so that few kernels are needed
constexpr int64_t GROUP_BYTES = 1200 << 10;  // of right matrices that stay in the CPU's L2 cache (2 MB)

Lanes exponential(Lanes x) {  // about 1e-7 relative
  x = _mm512_max_ps(_mm512_set1_ps(-200), x);  // 0
  const Lanes whole = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const Lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Lanes sum = _mm512_set1_ps(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + term;
  return _mm512_scalef_ps(sum, whole);
}

Lanes load(const float* from) { return _mm512_loadu_ps(from); }
Lanes load(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

__m256i rounded(Lanes values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }  // to bf16

Lanes where(__mmask16 mask, Lanes values) { return _mm512_maskz_mov_ps(mask, values); }  // else 0

void store(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
void store(BFloat16* to, Lanes values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded(values)); }

// ---- matrices
template <typename T>
struct Matrix {  // uninitialized
  int64_t rows, columns;
  std::unique_ptr<T, void (*)(void*)> memory;
  Matrix(int64_t rows, int64_t columns)
      : rows(rows), columns(columns),
        memory(static_cast<T*>(std::aligned_alloc(64, (rows * columns * sizeof(T) + 63) / 64 * 64)), std::free) {}
  T* at(int64_t row, int64_t column = 0) const { return memory.get() + row * columns + column; }
  void clear(int64_t from_row) const {
    std::memset(static_cast<void*>(at(from_row)), 0, (rows - from_row) * columns * sizeof(T));
  }
};

__m512i row_of_bf16(const BFloat16* from) { return _mm512_loadu_si512(from); }  // 32 numbers
__m512i row_of_bf16(const float* from) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(from + LANES), load(from)));
}

// 32 columns of a pair of rows of a right matrix: in bf16, brgemm takes it with the rows of a pair interleaved.
void store_pair(__m512i first, __m512i second, BFloat16* to) {
  const __m512i step = _mm512_set1_epi32(0x00010001);
  __m512i places = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                    0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, places, second));
  places = _mm512_add_epi16(places, _mm512_slli_epi16(step, 4));
  _mm512_storeu_si512(to + BLOCK, _mm512_permutex2var_epi16(first, places, second));
}

Matrix<float> right(Matrix<float>&& matrix) { return std::move(matrix); }
Matrix<BFloat16> right(const Matrix<BFloat16>& matrix) {
  Matrix<BFloat16> result(matrix.rows, matrix.columns);
  for (int64_t row = 0; row < matrix.rows; row += 2)
    for (int64_t i = 0; i < matrix.columns; i += BLOCK)
      store_pair(row_of_bf16(matrix.at(row, i)), row_of_bf16(matrix.at(row + 1, i)), result.at(row) + 2 * i);
  return result;
}

// Writes the transposed matrix: of a left one as a right one, and of a right one as a left one.
template <typename T>
void transpose(const Matrix<T>& matrix, bool is_right, T* to) {
  constexpr int64_t packed = sizeof(float) / sizeof(T);  // numbers per 4 bytes, of a row, or of a column if is_right
  const int64_t rows = is_right ? matrix.rows / packed : matrix.rows;
  const int64_t columns = is_right ? matrix.columns : matrix.columns / packed;
  const auto* from = reinterpret_cast<const float*>(matrix.at(0));
  at::vec::transpose_mxn<float>(from, columns, reinterpret_cast<float*>(to), rows, rows, columns);
}

template <typename T>
Matrix<T> transposed(const Matrix<T>& matrix, bool is_right) {
  Matrix<T> result(matrix.columns, matrix.rows);
  transpose(matrix, is_right, result.at(0));
  return result;
}

// left [m, k] times right [k, n] to out [m, n], whose rows are `width` apart.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const T* left, const T* right, float* out, int64_t width) {
  blas::brgemm(m, n, k, k, n, width, false, left, right, out, std::is_same_v<T, BFloat16>);
}

// ---- random bits
// Sets `count` bits, a multiple of 32, each to 0 in `dropped` of 65,536 cases. A counter is encrypted by five rounds of
// AES (ARS-5 of Salmon et al. 2011); 16 random bits decide on each.
void draw(int64_t seed, int64_t stream, uint32_t dropped, int64_t count, __mmask16* bits) {
  const __m512i least = _mm512_set1_epi16(static_cast<int16_t>(dropped));
  const __m512i weyl = _mm512_broadcast_i32x4(_mm_set_epi64x(0xBB67AE8584CAA73B, 0x9E3779B97F4A7C15));
  for (int64_t word = 0; word < count / 32; ++word) {
    __m512i key = _mm512_set1_epi64(seed);
    const __m512i counters = _mm512_set_epi64(stream, 3, stream, 2, stream, 1, stream, 0);
    __m512i block = _mm512_xor_si512(_mm512_mask_add_epi64(counters, 0x55, counters, _mm512_set1_epi64(4 * word)), key);
    for (int round = 0; round < 4; ++round) block = _mm512_aesenc_epi128(block, key = _mm512_add_epi64(key, weyl));
    block = _mm512_aesenclast_epi128(block, _mm512_add_epi64(key, weyl));
    reinterpret_cast<__mmask32*>(bits)[word] = _mm512_cmpge_epu16_mask(block, least);
  }
}

// The bits from a word of 32 on, 16 at a time.
__mmask16* masks(const Tensor& bits, int64_t word) {
  return reinterpret_cast<__mmask16*>(bits.data_ptr<int>() + word);
}

// ---- attention: a window's part of one head
struct Window {
  int64_t head, start, length, padded;  // start: first token
  int64_t bits;                         // first word of its bits
  __mmask16 has(int64_t column) const {  // which of 16 columns are tokens, not padding
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(static_cast<int>(length - column)));
  }
};

// The parts to compute, and the number of words of bits that they keep.
std::vector<Window> parts(at::IntArrayRef lengths, int64_t heads, int64_t& words) {
  std::vector<Window> all;
  int64_t start = 0;
  words = 0;
  for (const int64_t length : lengths) {
    const int64_t padded = (length + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t head = 0; head < heads; ++head, words += length * padded / 32)
      all.push_back({head, start, length, padded, words});
    start += length;
  }
  return all;
}

template <typename T>
struct Rows {  // [tokens, heads, size], with contiguous numbers of a head
  T* data;
  int64_t token, head, size;  // strides, and numbers of a head
  explicit Rows(const Tensor& of) : data(of.data_ptr<T>()), token(of.stride(0)), head(of.stride(1)), size(of.size(2)) {}
  T* at(const Window& window, int64_t row) const { return data + (window.start + row) * token + window.head * head; }
  Matrix<T> copied(const Window& window) const {  // [padded, size]
    Matrix<T> matrix(window.padded, size);
    for (int64_t row = 0; row < window.length; ++row) std::copy_n(at(window, row), size, matrix.at(row));
    matrix.clear(window.length);
    return matrix;
  }
  void write(const float* from, const Window& window, int64_t first, int64_t end) const {
    for (int64_t row = first; row < end; ++row, from += size)
      for (int64_t i = 0; i < size; i += LANES) store(at(window, row) + i, load(from + i));
  }
};

struct Options {
  uint32_t dropped;
  float scaling, kept_scale;
  explicit Options(int64_t dropped, double scaling = 1)
      : dropped(static_cast<uint32_t>(dropped)), scaling(static_cast<float>(scaling)),
        kept_scale(65536.0f / static_cast<float>(65536 - dropped)) {}
};

template <typename T>
void forward(const Window& window, const Rows<T>& query, const Rows<T>& key, const Rows<T>& value, const Rows<T>& out,
             const Options& options, float* sums, const __mmask16* bits) {
  const int64_t padded = window.padded, size = query.size;
  const auto queries = query.copied(window), keys = transposed(key.copied(window), false);
  const auto values = right(value.copied(window));
  const Matrix<float> scores(BLOCK, padded), result(BLOCK, size);
  const Matrix<T> probabilities(BLOCK, padded);
  for (int64_t first = 0; first < window.length; first += BLOCK) {
    const int64_t end = std::min(first + BLOCK, window.length);
    multiply(BLOCK, padded, size, queries.at(first), keys.at(0), scores.at(0), padded);
    for (int64_t row = first; row < end; ++row) {
      float* numbers = scores.at(row - first);
      Lanes largest = _mm512_set1_ps(-INFINITY), sum{};
      for (int64_t i = 0; i < padded; i += LANES)
        largest = _mm512_mask_max_ps(largest, window.has(i), largest, load(numbers + i));
      const float shift = _mm512_reduce_max_ps(largest) * options.scaling;
      for (int64_t i = 0; i < padded; i += LANES) {
        const Lanes part = where(window.has(i), exponential(load(numbers + i) * options.scaling - shift));
        sum += part;
        store(numbers + i, part);
      }
      const float total = _mm512_reduce_add_ps(sum), factor = options.kept_scale / total;
      sums[window.start + row] = shift + std::log(total);
      const auto* kept = bits + row * padded / LANES;
      for (int64_t i = 0; i < padded; i += LANES)
        store(probabilities.at(row - first, i), where(kept[i / LANES], load(numbers + i) * factor));
    }
    multiply(BLOCK, size, padded, probabilities.at(0), values.at(0), result.at(0), size);
    out.write(result.at(0), window, first, end);
  }
}

template <typename T>
void backward(const Window& window, const Rows<T>& gradient, const Rows<T>& query, const Rows<T>& key,
              const Rows<T>& value, const Rows<T>& out, const Rows<T>& of_query, const Rows<T>& of_key,
              const Rows<T>& of_value, const Options& options, const float* sums, const __mmask16* bits) {
  const int64_t padded = window.padded, size = query.size;
  auto queries = query.copied(window), gradients = gradient.copied(window), key_rows = key.copied(window);
  const auto keys = transposed(key_rows, false), values = transposed(value.copied(window), false);
  const auto right_keys = right(std::move(key_rows));
  const Matrix<float> scores(BLOCK, padded), of_scores(BLOCK, padded), result(padded, size);
  Matrix<T> dropped(padded, padded), differences(padded, padded);
  dropped.clear(window.length), differences.clear(window.length);
  for (int64_t first = 0; first < window.length; first += BLOCK) {
    const int64_t end = std::min(first + BLOCK, window.length);
    multiply(BLOCK, padded, size, queries.at(first), keys.at(0), scores.at(0), padded);
    multiply(BLOCK, padded, size, gradients.at(first), values.at(0), of_scores.at(0), padded);
    for (int64_t row = first; row < end; ++row) {
      Lanes products{};
      for (int64_t i = 0; i < size; i += LANES) products += load(out.at(window, row) + i) * load(gradients.at(row, i));
      const float mean = _mm512_reduce_add_ps(products), shift = sums[window.start + row];
      const auto* kept = bits + row * padded / LANES;
      for (int64_t i = 0; i < padded; i += LANES) {
        const Lanes exponent = load(scores.at(row - first, i)) * options.scaling - shift;
        const Lanes part = where(window.has(i), exponential(exponent));
        const Lanes of_part = where(kept[i / LANES], load(of_scores.at(row - first, i)) * options.kept_scale);
        store(dropped.at(row, i), where(kept[i / LANES], part * options.kept_scale));
        store(differences.at(row, i), part * options.scaling * (of_part - mean));
      }
    }
    multiply(BLOCK, size, padded, differences.at(first), right_keys.at(0), result.at(0), size);
    of_query.write(result.at(0), window, first, end);
  }
  const auto by_column = [](Matrix<T>&& pairs) { return transposed(right(std::move(pairs)), true); };
  const auto right_gradients = right(std::move(gradients)), right_queries = right(std::move(queries));
  multiply(padded, size, padded, by_column(std::move(dropped)).at(0), right_gradients.at(0), result.at(0), size);
  of_value.write(result.at(0), window, 0, window.length);
  multiply(padded, size, padded, by_column(std::move(differences)).at(0), right_queries.at(0), result.at(0), size);
  of_key.write(result.at(0), window, 0, window.length);
}

template <typename Work>
void each(int64_t count, const Work& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
    blas::brgemm_release();
  });
}

#define FOR_TYPE(tensor, ...)                                                      \
  if ((tensor).scalar_type() == at::kFloat) { using T = float; __VA_ARGS__ } \
  else { using T = BFloat16; __VA_ARGS__ }

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             at::IntArrayRef lengths, int64_t dropped, double scaling,
                                             int64_t seed) {
  const int64_t tokens = query.size(0), heads = query.size(1);
  int64_t words;
  const auto all = parts(lengths, heads, words);
  TORCH_CHECK(query.sizes() == key.sizes() && query.sizes() == value.sizes());
  TORCH_CHECK(words ? all.back().start + all.back().length == tokens : !tokens, "The windows do not have all tokens.");
  const Options options(dropped, scaling);
  auto out = at::empty(query.sizes(), query.options());
  auto sums = at::empty({heads, tokens}, value.options().dtype(at::kFloat));
  auto bits = at::empty({words}, value.options().dtype(at::kInt));
  FOR_TYPE(value, {
    const Rows<T> q(query), k(key), v(value), o(out);
    each(all.size(), [&](int64_t i) {
      const auto& window = all[i];
      auto* kept = masks(bits, window.bits);
      draw(seed, i, options.dropped, window.length * window.padded, kept);
      forward(window, q, k, v, o, options, sums.data_ptr<float>() + window.head * tokens, kept);
    });
  })
  return {out, sums, bits};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& sums,
                                                      const Tensor& bits, at::IntArrayRef lengths,
                                                      int64_t dropped, double scaling) {
  int64_t words;
  const auto all = parts(lengths, query.size(1), words);
  const Options options(dropped, scaling);
  const auto output = [&] { return at::empty(query.sizes(), query.options()); };
  auto of_query = output(), of_key = output(), of_value = output();
  FOR_TYPE(value, {
    const Rows<T> g(gradient), q(query), k(key), v(value), o(out), dq(of_query), dk(of_key), dv(of_value);
    each(all.size(), [&](int64_t i) {
      const auto& window = all[i];
      const float* own_sums = sums.data_ptr<float>() + window.head * query.size(0);
      backward(window, g, q, k, v, o, dq, dk, dv, options, own_sums, masks(bits, window.bits));
    });
  })
  return {of_query, of_key, of_value};
}

// ---- dropout, residual and layer norm in one pass, of rows whose size is a multiple of BLOCK
constexpr int64_t ROWS = 128;  // whose gradients are added first, so that the number of threads does not matter

template <typename T = float>
T* row_of(const Tensor& tensor, int64_t row) { return tensor.data_ptr<T>() + row * tensor.size(1); }

// -> layer_norm(dropout(rows) + residual), the same before weight and bias, its factor per row, bits of what is kept.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm(const Tensor& rows, const Tensor& residual, const Tensor& weight,
                                                    const Tensor& bias, double epsilon, int64_t dropped, int64_t seed) {
  const int64_t count = rows.size(0), size = rows.size(1);
  auto out = at::empty_like(residual), normalized = at::empty_like(residual);
  auto factors = at::empty({count}, weight.options());
  auto bits = at::empty({count, size / 32}, weight.options().dtype(at::kInt));
  const float *weights = weight.data_ptr<float>(), *biases = bias.data_ptr<float>();
  const Options options(dropped);
  FOR_TYPE(rows, {
    each(count, [&](int64_t row) {
      auto* kept = masks(bits, row * size / 32);
      draw(seed, row, options.dropped, size, kept);
      const T* from = row_of<T>(rows, row);
      float *normal = row_of(normalized, row), *to = row_of(out, row), *before = row_of(residual, row);
      Lanes sum{}, squares{};
      for (int64_t i = 0; i < size; i += LANES) {
        const Lanes value = where(kept[i / LANES], load(from + i) * options.kept_scale) + load(before + i);
        store(normal + i, value);
        sum += value;
      }
      const float mean = _mm512_reduce_add_ps(sum) / size;
      for (int64_t i = 0; i < size; i += LANES) {
        const Lanes difference = load(normal + i) - mean;
        squares += difference * difference;
      }
      const float factor = 1 / std::sqrt(_mm512_reduce_add_ps(squares) / size + static_cast<float>(epsilon));
      factors.data_ptr<float>()[row] = factor;
      for (int64_t i = 0; i < size; i += LANES) {
        const Lanes value = (load(normal + i) - mean) * factor;
        store(normal + i, value);
        store(to + i, value * load(weights + i) + load(biases + i));
      }
    });
  })
  return {out, normalized, factors, bits};
}

// -> gradients of rows, residual, weight and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_backward(const Tensor& gradient, const Tensor& normalized,
                                                             const Tensor& factors, const Tensor& bits,
                                                             const Tensor& weight, int64_t dropped,
                                                             at::ScalarType type) {
  const int64_t count = gradient.size(0), size = gradient.size(1), parts = (count + ROWS - 1) / ROWS;
  auto of_rows = at::empty(gradient.sizes(), gradient.options().dtype(type)), of_residual = at::empty_like(gradient);
  auto of_weight = at::zeros({parts, size}, weight.options()), of_bias = at::zeros({parts, size}, weight.options());
  const float* weights = weight.data_ptr<float>();
  const float kept_scale = Options(dropped).kept_scale;
  FOR_TYPE(of_rows, {
    each(parts, [&](int64_t part) {
      float *weight_sums = row_of(of_weight, part), *bias_sums = row_of(of_bias, part);
      for (int64_t row = part * ROWS; row < std::min((part + 1) * ROWS, count); ++row) {
        const float *given = row_of(gradient, row), *normal = row_of(normalized, row);
        Lanes sum{}, products{};
        for (int64_t i = 0; i < size; i += LANES) {
          const Lanes value = load(given + i), product = value * load(normal + i);
          sum += value * load(weights + i);
          products += product * load(weights + i);
          store(weight_sums + i, load(weight_sums + i) + product);
          store(bias_sums + i, load(bias_sums + i) + value);
        }
        const float mean = _mm512_reduce_add_ps(sum) / size, slope = _mm512_reduce_add_ps(products) / size;
        const float factor = factors.data_ptr<float>()[row];
        const auto* kept = masks(bits, row * size / 32);
        auto* before = row_of(of_residual, row);
        auto* to = row_of<T>(of_rows, row);
        for (int64_t i = 0; i < size; i += LANES) {
          const Lanes value = (load(given + i) * load(weights + i) - mean - load(normal + i) * slope) * factor;
          store(before + i, value);
          store(to + i, where(kept[i / LANES], value * kept_scale));
        }
      }
    });
  })
  return {of_rows, of_residual, of_weight.sum(0), of_bias.sum(0)};
}

// ---- linear layers in bf16, with weights and their gradients in fp32; sizes are multiples of BLOCK
// The number of parts of a right matrix, of `BLOCK` columns and k rows, that stay in the CPU's cache.
int64_t group_of(int64_t k) { return std::max<int64_t>(GROUP_BYTES / (k * BLOCK * sizeof(BFloat16)), 1); }

// rows [N, k] times the parts of a right matrix, `BLOCK` columns each, which `part(i)` gives. `write(row, column,
// numbers)` takes the result, `BLOCK` numbers of a row at a time.
template <typename Part, typename Write>
void multiply_rows(const Tensor& rows, int64_t columns, const Part& part, const Write& write) {
  const int64_t count = rows.size(0), k = rows.size(1);
  const auto* left = rows.data_ptr<BFloat16>();
  Matrix<BFloat16> last(BLOCK, k);  // the last block, padded
  std::copy_n(left + count / BLOCK * BLOCK * k, count % BLOCK * k, last.at(0));
  last.clear(count % BLOCK);
  const int64_t all = columns / BLOCK, group = group_of(k);
  each((all + group - 1) / group, [&](int64_t number) {
    std::vector<Matrix<BFloat16>> rights;
    for (int64_t i = number * group; i < std::min((number + 1) * group, all); ++i) rights.push_back(part(i));
    const Matrix<float> result(BLOCK, BLOCK);
    for (int64_t first = 0; first < count; first += BLOCK)
      for (size_t i = 0; i < rights.size(); ++i) {
        const auto* block = first + BLOCK <= count ? left + first * k : last.at(0);
        multiply(BLOCK, BLOCK, k, block, rights[i].at(0), result.at(0), BLOCK);
        for (int64_t row = first; row < std::min(first + BLOCK, count); ++row)
          write(row, (number * group + i) * BLOCK, result.at(row - first));
      }
  });
}

// `BLOCK` columns of rows [N, width] as a right matrix of `padded` rows, and their sums.
template <typename T>
Matrix<BFloat16> columns_of(const Tensor& rows, int64_t first, int64_t padded, float* sums = nullptr) {
  const int64_t count = rows.size(0), width = rows.size(1);
  Matrix<BFloat16> columns(padded, BLOCK);
  columns.clear(count / 2 * 2);
  const auto* from = rows.data_ptr<T>() + first;
  Lanes low{}, high{};
  for (int64_t row = 0; row < count; row += 2, from += 2 * width) {
    const bool is_last = row + 1 == count;
    store_pair(row_of_bf16(from), is_last ? __m512i{} : row_of_bf16(from + width), columns.at(row));
    for (int64_t i = 0; sums && i <= !is_last; ++i) {
      low += load(from + i * width);
      high += load(from + i * width + LANES);
    }
  }
  if (sums) store(sums, low), store(sums + LANES, high);
  return columns;
}

// rows [N, in] bf16, weight [out, in] fp32, bias [out] fp32 -> [N, out] bf16.
Tensor linear(const Tensor& rows, const Tensor& weight, const Tensor& bias) {
  const int64_t size_in = weight.size(1), size_out = weight.size(0);
  auto out = at::empty({rows.size(0), size_out}, rows.options());
  const float* biases = bias.data_ptr<float>();
  auto* to = out.data_ptr<BFloat16>();
  const auto part = [&](int64_t i) {
    Matrix<BFloat16> rounded_rows(BLOCK, size_in);
    for (int64_t at = 0; at < BLOCK * size_in; at += BLOCK)
      _mm512_storeu_si512(rounded_rows.at(0) + at, row_of_bf16(row_of(weight, i * BLOCK) + at));
    return transposed(rounded_rows, false);
  };
  multiply_rows(rows, size_out, part, [&](int64_t row, int64_t column, const float* numbers) {
    for (int64_t at = 0; at < BLOCK; at += LANES)
      store(to + row * size_out + column + at, load(numbers + at) + load(biases + column + at));
  });
  return out;
}

// gradient [N, out] bf16 -> gradients of rows (bf16, or fp32), of weight and of bias (fp32).
std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& gradient, const Tensor& rows, const Tensor& weight,
                                                   at::ScalarType type) {
  const int64_t count = rows.size(0), size_in = weight.size(1), size_out = weight.size(0);
  const int64_t step = std::max<int64_t>(BLOCK, std::bit_floor(static_cast<uint64_t>(count)) / 8);
  const int64_t padded = (count + step - 1) / step * step;  // few sizes: torch keeps a kernel of each
  auto of_rows = at::empty(rows.sizes(), rows.options().dtype(type));
  auto of_weight = at::empty(weight.sizes(), weight.options()), of_bias = at::empty({size_out}, weight.options());
  FOR_TYPE(of_rows, {
    auto* to = of_rows.data_ptr<T>();
    const auto part = [&](int64_t i) { return columns_of<float>(weight, i * BLOCK, size_out); };
    multiply_rows(gradient, size_in, part, [&](int64_t row, int64_t column, const float* numbers) {
      for (int64_t at = 0; at < BLOCK; at += LANES) store(to + row * size_in + column + at, load(numbers + at));
    });
  })
  auto left = at::empty({size_out, padded}, rows.options());
  for (int64_t i = 0; i < size_out; i += BLOCK) {
    const auto block = columns_of<BFloat16>(gradient, i, padded, of_bias.data_ptr<float>() + i);
    transpose(block, true, row_of<BFloat16>(left, i));
  }
  const auto part = [&](int64_t i) { return columns_of<BFloat16>(rows, i * BLOCK, padded); };
  auto* to = of_weight.data_ptr<float>();
  multiply_rows(left, size_in, part, [&](int64_t row, int64_t column, const float* numbers) {
    for (int64_t at = 0; at < BLOCK; at += LANES) store(to + row * size_in + column + at, load(numbers + at));
  });
  return {of_rows, of_weight, of_bias};
}

}  // namespace

TORCH_LIBRARY(hvd_bert, library) {
  library.def("attention", attention).def("attention_backward", attention_backward);
  library.def("add_norm", add_norm).def("add_norm_backward", add_norm_backward);
  library.def("linear", linear).def("linear_backward", linear_backward);
}
