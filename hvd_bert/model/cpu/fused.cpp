// Attention with dropout inside packed windows, dropout + residual + layer norm (fp32, bf16), and linear layers (bf16),
// for CPUs with AVX-512 and instructions for bf16. fused.py is the interface.
//
// A window's scores stay in the CPU's cache. Of the probabilities, one bit per pair of tokens is kept for the backward
// pass, which computes them again (Dao et al. 2022, arXiv:2205.14135). Products are torch's brgemm, which adds in fp32.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/CPUAllocator.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace {
using at::BFloat16;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lanes = __m512;  // 16 numbers, with the compiler's operators

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 32;  // rows and columns are padded to it in scratch memory, so that few kernels are needed
constexpr int64_t GROUP_BYTES = 1200 << 10;  // of right matrices that stay in the CPU's L2 cache (2 MB)
constexpr int64_t ROWS = 128;  // whose gradients a thread adds: not by the number of threads, which would change bits

Lanes exponential(Lanes x) {  // about 1e-7 relative
  x = _mm512_max_ps(_mm512_set1_ps(-200), x);  // 0
  const Lanes whole = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const Lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Lanes sum = _mm512_set1_ps(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + term;
  return _mm512_scalef_ps(sum, whole);
}

Lanes where(__mmask16 mask, Lanes values) { return _mm512_maskz_mov_ps(mask, values); }  // else 0
__m256i to_bf16(Lanes values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }
Lanes load(const float* from) { return _mm512_loadu_ps(from); }
__m256i load_bf16(const float* from) { return to_bf16(load(from)); }
__m256i load_bf16(const BFloat16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
__m512i high_halves(__m256i numbers) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16); }
Lanes load(const BFloat16* from) { return _mm512_castsi512_ps(high_halves(load_bf16(from))); }

void store(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
void store(BFloat16* to, Lanes values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(values)); }

template <typename T = float>
T* row_of(const Tensor& tensor, int64_t row) { return tensor.data_ptr<T>() + row * tensor.size(-1); }

// Calls work(i, zero) for each i, with a zero of a tensor's type.
template <typename Work>
void each(int64_t count, at::ScalarType type, const Work& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) type == at::kFloat ? work(i, 0.0f) : work(i, BFloat16());
    at::native::cpublas::brgemm_release();
  });
}

// ---- matrices
template <typename T>
struct Matrix {  // uninitialized; at a multiple of 64 bytes: on other operands, brgemm takes four times as long
  int64_t rows, columns;
  at::DataPtr memory = c10::GetCPUAllocator()->allocate(rows * columns * sizeof(T));
  T* at(int64_t row, int64_t column = 0) const { return static_cast<T*>(memory.get()) + row * columns + column; }
  void clear(int64_t from_row) const { std::fill(at(from_row), at(rows), T(0)); }
};

// `count` rows, `stride` apart, as a right matrix of `padded` rows: in bf16, brgemm takes it with the rows of a pair
// interleaved. Adds the rows to `sums`.
template <typename T>
Matrix<BFloat16> interleaved(const T* rows, int64_t stride, int64_t count, int64_t padded, int64_t columns = BLOCK,
                             float* sums = nullptr) {
  Matrix<BFloat16> result{padded, columns};
  result.clear(count / 2 * 2);
  for (int64_t row = 0; row < count; row += 2)
    for (int64_t i = 0; i < columns; i += LANES) {
      const T *first = rows + row * stride + i, *second = row + 1 < count ? first + stride : nullptr;
      const __m512i high = high_halves(second ? load_bf16(second) : __m256i{});
      _mm512_storeu_si512(result.at(row) + 2 * i, _mm512_cvtepu16_epi32(load_bf16(first)) | high);
      if (sums) store(sums + i, load(sums + i) + load(first) + (second ? load(second) : Lanes{}));
    }
  return result;
}

Matrix<float> right(Matrix<float>&& matrix) { return std::move(matrix); }
Matrix<BFloat16> right(const Matrix<BFloat16>& matrix) {
  return interleaved(matrix.at(0), matrix.columns, matrix.rows, matrix.rows, matrix.columns);
}

// Writes the transposed matrix: of a left one as a right one, and of a right one as a left one.
template <typename T>
void transpose(const Matrix<T>& matrix, bool is_right, T* to) {
  constexpr int64_t packed = sizeof(float) / sizeof(T);  // numbers per 4 bytes, of a row, or of a column if is_right
  const int64_t rows = matrix.rows / (is_right ? packed : 1), columns = matrix.columns / (is_right ? 1 : packed);
  const auto* from = reinterpret_cast<const float*>(matrix.at(0));
  at::vec::transpose_mxn<float>(from, columns, reinterpret_cast<float*>(to), rows, rows, columns);
}

template <typename T>
Matrix<T> transposed(const Matrix<T>& matrix, bool is_right) {
  Matrix<T> result{matrix.columns, matrix.rows};
  transpose(matrix, is_right, result.at(0));
  return result;
}

// `count` rows of a left matrix times a right one, which is interleaved in bf16.
template <typename T>
void multiply(int64_t count, const T* left, const Matrix<T>& right, const Matrix<float>& out) {
  const int64_t n = right.columns, k = right.rows;
  at::native::cpublas::brgemm(count, n, k, k, n, n, false, left, right.at(0), out.at(0), std::is_same_v<T, BFloat16>);
}

// ---- dropout
float kept_scale(int64_t dropped) { return 65536.0f / static_cast<float>(65536 - dropped); }

// Sets `count` bits, a multiple of 32, each to 0 in `dropped` of 65,536 cases. A counter is encrypted by five rounds of
// AES (ARS-5 of Salmon et al. 2011); 16 random bits decide on each.
void draw(int64_t seed, int64_t stream, int64_t dropped, int64_t count, __mmask16* bits) {
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

// ---- attention
struct Window {  // its part of one head
  int64_t head, start, length, padded, bits;  // start: first token; bits: the first, in units of 16
  // Which of 16 columns are tokens, not padding.
  __mmask16 has(int64_t column) const { return (1 << std::clamp<int64_t>(length - column, 0, LANES)) - 1; }
};

// The parts to compute, and an end after the last token and the last bit.
std::vector<Window> parts(at::IntArrayRef lengths, int64_t heads) {
  std::vector<Window> all;
  int64_t start = 0, bits = 0;
  for (const int64_t length : lengths) {
    const int64_t padded = (length + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t head = 0; head < heads; ++head, bits += length * padded / LANES)
      all.push_back({head, start, length, padded, bits});
    start += length;
  }
  all.push_back({0, start, 0, 0, bits});
  return all;
}

template <typename T>
struct Rows {  // a window's, of a tensor [tokens, heads, size] with contiguous numbers of a head
  const Window& window;
  T* data;
  int64_t stride, size;
  Rows(const Tensor& of, const Window& window)
      : window(window), data(of.data_ptr<T>() + window.start * of.stride(0) + window.head * of.stride(1)),
        stride(of.stride(0)), size(of.size(2)) {}
  T* at(int64_t row) const { return data + row * stride; }
  Matrix<T> copied() const {  // [padded, size]
    Matrix<T> matrix{window.padded, size};
    for (int64_t row = 0; row < window.length; ++row) std::copy_n(at(row), size, matrix.at(row));
    matrix.clear(window.length);
    return matrix;
  }
  void write(const Matrix<float>& from, int64_t first, int64_t end) const {
    for (int64_t row = first; row < end; ++row)
      for (int64_t i = 0; i < size; i += LANES) store(at(row) + i, load(from.at(row - first, i)));
  }
};

Tensors attention(const Tensor& query, const Tensor& key, const Tensor& value, at::IntArrayRef lengths,
                  int64_t dropped, double scaling, int64_t seed) {
  const auto all = parts(lengths, query.size(1));
  TORCH_CHECK(query.sizes() == key.sizes() && query.sizes() == value.sizes() && query.size(0) == all.back().start);
  const auto out = value.new_empty(value.sizes()), bits = value.new_empty({all.back().bits}, at::kUInt16);
  const auto sums = value.new_empty({query.size(1), query.size(0)}, at::kFloat);
  each(all.size() - 1, value.scalar_type(), [&, scaling = static_cast<float>(scaling)](int64_t part, auto zero) {
    using T = decltype(zero);
    const auto& window = all[part];
    const int64_t padded = window.padded, size = query.size(2);
    float* own_sums = row_of(sums, window.head) + window.start;
    auto* kept = bits.data_ptr<uint16_t>() + window.bits;
    draw(seed, part, dropped, window.length * padded, kept);
    const auto copied = [&](const Tensor& of) { return Rows<T>(of, window).copied(); };
    const auto queries = copied(query), keys = transposed(copied(key), false), values = right(copied(value));
    const Matrix<float> scores{BLOCK, padded}, result{BLOCK, size};
    const Matrix<T> probabilities{BLOCK, padded};
    for (int64_t first = 0; first < window.length; first += BLOCK) {
      const int64_t end = std::min(first + BLOCK, window.length);
      multiply(BLOCK, queries.at(first), keys, scores);
      for (int64_t row = first; row < end; ++row, kept += padded / LANES) {
        float* numbers = scores.at(row - first);
        Lanes largest = _mm512_set1_ps(-INFINITY), sum{};
        for (int64_t i = 0; i < padded; i += LANES)
          largest = _mm512_mask_max_ps(largest, window.has(i), largest, load(numbers + i));
        const float shift = _mm512_reduce_max_ps(largest) * scaling;
        for (int64_t i = 0; i < padded; i += LANES) {
          const Lanes exponentials = where(window.has(i), exponential(load(numbers + i) * scaling - shift));
          sum += exponentials;
          store(numbers + i, exponentials);
        }
        const float total = _mm512_reduce_add_ps(sum), factor = kept_scale(dropped) / total;
        own_sums[row] = shift + std::log(total);
        for (int64_t i = 0; i < padded; i += LANES)
          store(probabilities.at(row - first, i), where(kept[i / LANES], load(numbers + i) * factor));
      }
      multiply(BLOCK, probabilities.at(0), values, result);
      Rows<T>(out, window).write(result, first, end);
    }
  });
  return {out, sums, bits};
}

Tensors attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
                           const Tensor& out, const Tensor& sums, const Tensor& bits, at::IntArrayRef lengths,
                           int64_t dropped, double scaling) {
  const auto all = parts(lengths, query.size(1));
  const auto empty = [&] { return query.new_empty(query.sizes()); };
  const auto of_query = empty(), of_key = empty(), of_value = empty();
  each(all.size() - 1, value.scalar_type(), [&, scaling = static_cast<float>(scaling)](int64_t part, auto zero) {
    using T = decltype(zero);
    const auto& window = all[part];
    const int64_t padded = window.padded, size = query.size(2);
    const float* own_sums = row_of(sums, window.head) + window.start;
    const auto* kept = bits.data_ptr<uint16_t>() + window.bits;
    const auto rows = [&](const Tensor& of) { return Rows<T>(of, window); };
    const auto outputs = rows(out);
    auto queries = rows(query).copied(), gradients = rows(gradient).copied(), key_rows = rows(key).copied();
    const auto keys = transposed(key_rows, false), values = transposed(rows(value).copied(), false);
    const auto right_keys = right(std::move(key_rows));
    const Matrix<float> scores{BLOCK, padded}, of_scores{BLOCK, padded}, result{padded, size};
    Matrix<T> probabilities{padded, padded}, differences{padded, padded};
    probabilities.clear(window.length), differences.clear(window.length);
    for (int64_t first = 0; first < window.length; first += BLOCK) {
      const int64_t end = std::min(first + BLOCK, window.length);
      multiply(BLOCK, queries.at(first), keys, scores);
      multiply(BLOCK, gradients.at(first), values, of_scores);
      for (int64_t row = first; row < end; ++row, kept += padded / LANES) {
        Lanes products{};
        for (int64_t i = 0; i < size; i += LANES) products += load(outputs.at(row) + i) * load(gradients.at(row, i));
        const float mean = _mm512_reduce_add_ps(products), shift = own_sums[row], scale = kept_scale(dropped);
        for (int64_t i = 0; i < padded; i += LANES) {
          const Lanes exponent = load(scores.at(row - first, i)) * scaling - shift;
          const Lanes probability = where(window.has(i), exponential(exponent));
          const Lanes of_part = where(kept[i / LANES], load(of_scores.at(row - first, i)) * scale);
          store(probabilities.at(row, i), where(kept[i / LANES], probability * scale));
          store(differences.at(row, i), probability * scaling * (of_part - mean));
        }
      }
      multiply(BLOCK, differences.at(first), right_keys, result);
      rows(of_query).write(result, first, end);
    }
    const auto write = [&](const Tensor& to, Matrix<T>& pairs, Matrix<T>& matrix) {  // pairs, transposed, times matrix
      multiply(padded, transposed(right(std::move(pairs)), true).at(0), right(std::move(matrix)), result);
      rows(to).write(result, 0, window.length);
    };
    write(of_value, probabilities, gradients);
    write(of_key, differences, queries);
  });
  return {of_query, of_key, of_value};
}

// ---- dropout, residual and layer norm in one pass, of rows [..., size]; sizes are multiples of BLOCK
// -> layer_norm(dropout(rows) + residual), the same before weight and bias, its factor per row, bits of what is kept.
Tensors add_norm(const Tensor& rows, const Tensor& residual, const Tensor& weight, const Tensor& bias, double epsilon,
                 int64_t dropped, int64_t seed) {
  const int64_t size = weight.size(0), count = rows.numel() / size;
  const auto out = residual.new_empty(residual.sizes()), normalized = residual.new_empty(residual.sizes());
  const auto factors = weight.new_empty({count}), bits = weight.new_empty({count, size / LANES}, at::kUInt16);
  const float *weights = weight.data_ptr<float>(), *biases = bias.data_ptr<float>();
  each(count, rows.scalar_type(), [&, scale = kept_scale(dropped)](int64_t row, auto zero) {
    auto* kept = row_of<uint16_t>(bits, row);
    draw(seed, row, dropped, size, kept);
    const auto* from = row_of<decltype(zero)>(rows, row);
    float *normal = row_of(normalized, row), *to = row_of(out, row), *before = row_of(residual, row);
    Lanes sum{}, squares{};
    for (int64_t i = 0; i < size; i += LANES) {
      const Lanes value = where(kept[i / LANES], load(from + i) * scale) + load(before + i);
      store(normal + i, value);
      sum += value;
    }
    const float mean = _mm512_reduce_add_ps(sum) / size;
    for (int64_t i = 0; i < size; i += LANES) squares += (load(normal + i) - mean) * (load(normal + i) - mean);
    const float factor = 1 / std::sqrt(_mm512_reduce_add_ps(squares) / size + static_cast<float>(epsilon));
    factors.data_ptr<float>()[row] = factor;
    for (int64_t i = 0; i < size; i += LANES) {
      const Lanes value = (load(normal + i) - mean) * factor;
      store(normal + i, value);
      store(to + i, value * load(weights + i) + load(biases + i));
    }
  });
  return {out, normalized, factors, bits};
}

// -> gradients of rows, residual, weight and bias.
Tensors add_norm_backward(const Tensor& gradient, const Tensor& normalized, const Tensor& factors, const Tensor& bits,
                          const Tensor& weight, int64_t dropped, at::ScalarType type) {
  const int64_t size = weight.size(0), count = gradient.numel() / size, parts = (count + ROWS - 1) / ROWS;
  const auto of_rows = gradient.new_empty(gradient.sizes(), type), of_residual = gradient.new_empty(gradient.sizes());
  const auto of_weight = weight.new_zeros({parts, size}), of_bias = weight.new_zeros({parts, size});
  const float* weights = weight.data_ptr<float>();
  each(parts, type, [&, scale = kept_scale(dropped)](int64_t part, auto zero) {
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
      const auto* kept = row_of<uint16_t>(bits, row);
      auto* of_row = row_of<decltype(zero)>(of_rows, row);
      float* of_before = row_of(of_residual, row);
      for (int64_t i = 0; i < size; i += LANES) {
        const Lanes value = (load(given + i) * load(weights + i) - mean - load(normal + i) * slope) * factor;
        store(of_before + i, value);
        store(of_row + i, where(kept[i / LANES], value * scale));
      }
    }
  });
  return {of_rows, of_residual, of_weight.sum(0), of_bias.sum(0)};
}

// ---- linear layers in bf16, with weights and their gradients in fp32; sizes are multiples of BLOCK
// Writes rows [..., k] times a right matrix, plus a bias, to out [..., columns]. `part(i)`: its columns from i.
template <typename Part>
void multiply_rows(const Tensor& rows, const Part& part, const Tensor& out, const float* bias = nullptr) {
  const int64_t k = rows.size(-1), columns = out.size(-1), count = rows.numel() / k, whole = count / BLOCK * BLOCK;
  const auto* left = rows.data_ptr<BFloat16>();
  const Matrix<BFloat16> last{BLOCK, k};  // the last block, padded
  std::copy_n(left + whole * k, (count - whole) * k, last.at(0));
  last.clear(count - whole);
  const int64_t group = std::max<int64_t>(GROUP_BYTES / (k * BLOCK * sizeof(BFloat16)), 1) * BLOCK;
  each((columns + group - 1) / group, out.scalar_type(), [&](int64_t number, auto zero) {
    std::vector<Matrix<BFloat16>> parts;
    const int64_t begin = number * group, end = std::min(begin + group, columns);
    for (int64_t column = begin; column < end; column += BLOCK) parts.push_back(part(column));
    const Matrix<float> result{BLOCK, BLOCK};
    auto* to = out.data_ptr<decltype(zero)>();
    for (int64_t first = 0; first < count; first += BLOCK)
      for (int64_t column = begin; column < end; column += BLOCK) {
        multiply(BLOCK, first < whole ? left + first * k : last.at(0), parts[(column - begin) / BLOCK], result);
        for (int64_t row = first; row < std::min(first + BLOCK, count); ++row)
          for (int64_t i = 0; i < BLOCK; i += LANES) {
            const Lanes numbers = load(result.at(row - first, i));
            store(to + row * columns + column + i, bias ? numbers + load(bias + column + i) : numbers);
          }
      }
  });
}

// rows [..., in] bf16, weight [out, in] fp32, bias [out] fp32 -> [..., out] bf16.
Tensor linear(const Tensor& rows, const Tensor& weight, const Tensor& bias) {
  auto sizes = rows.sizes().vec();
  sizes.back() = weight.size(0);
  const auto out = rows.new_empty(sizes);
  const auto part = [&](int64_t row) {
    const Matrix<BFloat16> rounded{BLOCK, weight.size(1)};
    const float* from = row_of(weight, row);
    for (int64_t i = 0; i < BLOCK * rounded.columns; i += LANES) store(rounded.at(0) + i, load(from + i));
    return transposed(rounded, false);
  };
  multiply_rows(rows, part, out, bias.data_ptr<float>());
  return out;
}

// gradient [..., out] bf16 -> gradients of rows (bf16, or fp32), of weight and of bias (fp32).
Tensors linear_backward(const Tensor& gradient, const Tensor& rows, const Tensor& weight, at::ScalarType type) {
  const int64_t size_in = weight.size(1), size_out = weight.size(0), count = rows.numel() / size_in;
  const int64_t step = std::max<int64_t>(BLOCK, std::bit_floor(static_cast<uint64_t>(count)) / 8);
  const int64_t padded = (count + step - 1) / step * step;  // few sizes: torch keeps a kernel of each
  const auto of_rows = rows.new_empty(rows.sizes(), type), of_weight = weight.new_empty(weight.sizes());
  const auto of_bias = weight.new_zeros({size_out}), left = rows.new_empty({size_out, padded});
  const auto *gradients = gradient.data_ptr<BFloat16>(), *inputs = rows.data_ptr<BFloat16>();
  float *weights = weight.data_ptr<float>(), *sums = of_bias.data_ptr<float>();
  const auto part_of_weight = [&](int64_t i) { return interleaved(weights + i, size_in, size_out, size_out); };
  multiply_rows(gradient, part_of_weight, of_rows);
  for (int64_t i = 0; i < size_out; i += BLOCK)
    transpose(interleaved(gradients + i, size_out, count, padded, BLOCK, sums + i), true, row_of<BFloat16>(left, i));
  const auto part_of_rows = [&](int64_t i) { return interleaved(inputs + i, size_in, count, padded); };
  multiply_rows(left, part_of_rows, of_weight);
  return {of_rows, of_weight, of_bias};
}

}  // namespace

TORCH_LIBRARY(hvd_bert, library) {
  library.def("attention", attention).def("attention_backward", attention_backward);
  library.def("add_norm", add_norm).def("add_norm_backward", add_norm_backward);
  library.def("linear", linear).def("linear_backward", linear_backward);
}
