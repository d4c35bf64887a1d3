// Attention in one pass over blocks of queries whose scores fit into the processor's cache. The backward needs only one
// stored number per query; it recomputes the weights and the dropout mask.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "attention_plain.h"
#include "memory.h"
#include "operators.h"
#include "products.h"
#include "vector.h"

namespace ortlaunch {
namespace {

constexpr int64_t kQueries = 64;  // queries in one block
const float kNever = -std::numeric_limits<float>::infinity();

// The strides of a tensor [B, H, L, E]; the E numbers of a head and a position are contiguous.
struct Layout {
  int64_t batch, head, place;
};

Layout heads_first(const at::Tensor& x) {
  return {x.size(1) * x.size(2) * x.size(3), x.size(2) * x.size(3), x.size(3)};
}

// The same for a tensor [B, L, H, E].
Layout places_first(const at::Tensor& x) {
  return {x.size(1) * x.size(2) * x.size(3), x.size(3), x.size(2) * x.size(3)};
}

struct Problem {
  int64_t batches, heads, shared_heads, queries, keys, size, value_size;
  Layout query, key, value, out;
  bool causal;
  double scale, p;
};

// Rotary position embedding: x * cos + rotated(x) * sin, where rotated swaps the halves of x and negates the second.
// It is applied to rows of query and key while they are in the processor's cache. Of each row it turns the first R
// numbers and keeps the others.
class Rotation {
 public:
  Rotation() = default;
  // Cosine and sine are [B or 1, L, R], and the rows have `width` numbers, R or more.
  Rotation(const at::Tensor& cosine, const at::Tensor& sine, int64_t width)
      : cosine_(cosine), sine_(sine), width_(width) {
    cosines_ = cosine.const_data_ptr<float>();
    sines_ = sine.const_data_ptr<float>();
    size_ = cosine.size(2);
    of_cosine_ = cosine.size(0) == 1 ? 0 : cosine.size(1) * size_;
    of_sine_ = sine.size(0) == 1 ? 0 : sine.size(1) * size_;
  }

  bool is_none() const { return cosines_ == nullptr; }

  // Rotates `count` rows from position `first` on; the rows of the result follow each other.
  void turn(int64_t batch, int64_t first, int64_t count, const float* from, int64_t step, float* to) const {
    const int64_t half = size_ / 2;
    for (int64_t row = 0; row < count; ++row, from += step, to += width_) {
      const float* cosine = cosines_ + batch * of_cosine_ + (first + row) * size_;
      const float* sine = sines_ + batch * of_sine_ + (first + row) * size_;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = from[i] * cosine[i] - from[i + half] * sine[i];
        to[i + half] = from[i + half] * cosine[i + half] + from[i] * sine[i + half];
      }
      std::copy(from + size_, from + width_, to + size_);
    }
  }

  // The gradient of `turn`.
  void turn_back(int64_t batch, int64_t first, int64_t count, const float* from, float* to, int64_t step) const {
    const int64_t half = size_ / 2;
    for (int64_t row = 0; row < count; ++row, from += width_, to += step) {
      const float* cosine = cosines_ + batch * of_cosine_ + (first + row) * size_;
      const float* sine = sines_ + batch * of_sine_ + (first + row) * size_;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = from[i] * cosine[i] + from[i + half] * sine[i + half];
        to[i + half] = from[i + half] * cosine[i + half] - from[i] * sine[i];
      }
      std::copy(from + size_, from + width_, to + size_);
    }
  }

 private:
  at::Tensor cosine_, sine_;
  const float *cosines_ = nullptr, *sines_ = nullptr;
  int64_t width_ = 0, size_ = 0, of_cosine_ = 0, of_sine_ = 0;
};

// The values of a mask, and the last key that each block of queries sees.
class Mask {
 public:
  Mask(const std::optional<at::Tensor>& mask, const Problem& problem) : problem_(problem) {
    if (!mask.has_value() || !mask->defined()) return;
    const bool chooses = mask->scalar_type() == at::kBool || mask->scalar_type() == at::kByte;
    mask_ = mask->expand({problem.batches, problem.heads, problem.queries, problem.keys});
    if (!chooses) mask_ = mask_.to(at::kFloat);
    if (mask_.stride(3) != 1 && problem.keys > 1) mask_ = mask_.contiguous();
    if (chooses) {
      choice_ = static_cast<const uint8_t*>(mask_.data_ptr());
    } else {
      added_ = mask_.data_ptr<float>();
    }
    find_ends();
  }

  // Returns the end of the range of keys that any query from `first` to `last` may see.
  int64_t end(int64_t batch, int64_t head, int64_t first, int64_t last) const {
    const int64_t causal_end = problem_.causal ? std::min(problem_.keys, last) : problem_.keys;
    if (ends_.empty()) return causal_end;
    const int64_t blocks = (problem_.queries + kQueries - 1) / kQueries;
    const int64_t place = ((batch % batches_) * heads_ + head % heads_) * blocks + first / kQueries;
    return std::min(causal_end, ends_[place]);
  }

  // Adds the mask to a row of `count` scores.
  void apply(float* scores, int64_t batch, int64_t head, int64_t query, int64_t count) const {
    if (problem_.causal) {
      for (int64_t key = query + 1; key < count; ++key) scores[key] = kNever;
    }
    if (choice_ != nullptr) {
      const uint8_t* choice = choice_ + offset(batch, head, query);
      for (int64_t key = 0; key < count; ++key) scores[key] = choice[key] ? scores[key] : kNever;
    } else if (added_ != nullptr) {
      const float* added = added_ + offset(batch, head, query);
      for (int64_t key = 0; key < count; ++key) scores[key] += added[key];
    }
  }

 private:
  int64_t offset(int64_t batch, int64_t head, int64_t query) const {
    return batch * mask_.stride(0) + head * mask_.stride(1) + query * mask_.stride(2);
  }

  bool hides(int64_t place) const { return choice_ != nullptr ? !choice_[place] : added_[place] == kNever; }

  void find_ends() {
    batches_ = mask_.stride(0) == 0 ? 1 : problem_.batches;
    heads_ = mask_.stride(1) == 0 ? 1 : problem_.heads;
    const int64_t blocks = (problem_.queries + kQueries - 1) / kQueries;
    ends_.resize(batches_ * heads_ * blocks);
    at::parallel_for(0, static_cast<int64_t>(ends_.size()), 16, [&](int64_t begin, int64_t stop) {
      for (int64_t place = begin; place < stop; ++place) {
        const int64_t batch = place / (heads_ * blocks), head = place / blocks % heads_, block = place % blocks;
        const int64_t last = std::min(problem_.queries, (block + 1) * kQueries);
        int64_t end = 0;
        for (int64_t query = block * kQueries; query < last; ++query) {
          const int64_t row = offset(batch, head, query);
          int64_t key = problem_.keys;
          while (key > end && hides(row + key - 1)) --key;
          end = std::max(end, key);
        }
        ends_[place] = end;
      }
    });
  }

  const Problem& problem_;
  at::Tensor mask_;
  const uint8_t* choice_ = nullptr;
  const float* added_ = nullptr;
  int64_t batches_ = 1, heads_ = 1;
  std::vector<int64_t> ends_;
};

// What a thread's buffers are for.
enum class Use { kScores, kKeys, kQueries, kKeySlopes, kQuerySlopes };

// Buffers of a thread, which later calls reuse.
template <Use use>
float* scratch(int64_t count) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

int64_t padded(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

// Replaces scores by weights that sum to one, and returns the logarithm of the sum of the scores' exponentials. If no
// key is seen, the logarithm is infinite and the weights are zero.
float softmax(float* row, int64_t count, int64_t width) {
  for (int64_t at = count; at < width; ++at) row[at] = kNever;
  Floats most = all(kNever);
  for (int64_t at = 0; at < width; at += kLanes) {
    const Floats value = load(row + at);
    most = value > most ? value : most;
  }
  const float top = largest(most);
  if (top == kNever) {
    // A NaN does not count as a hidden key.
    float total = 0.0f;
    for (int64_t at = 0; at < count; ++at) total += row[at] != row[at] ? row[at] : 0.0f;
    for (int64_t at = 0; at < width; ++at) row[at] = total;
    return total != total ? total : std::numeric_limits<float>::infinity();
  }
  Floats total = Floats{};
  for (int64_t at = 0; at < width; at += kLanes) {
    const Floats value = exponential(load(row + at) - top);
    store(row + at, value);
    total += value;
  }
  const float share = 1.0f / sum(total);
  for (int64_t at = 0; at < width; at += kLanes) store(row + at, load(row + at) * share);
  // Beside a key whose score is infinite the others have no weight, also in the backward.
  return top == std::numeric_limits<float>::infinity() ? top : top - std::log(share);
}

void drop(float* row, int64_t width, const Noise& noise, uint64_t number) {
  Floats factors[kParts];
  for (int64_t at = 0; at < width; at += kBlock) {
    noise.block(factors, number, static_cast<uint32_t>(at / kBlock));
    for (int part = 0; part < kParts; ++part) {
      float* place = row + at + part * kLanes;
      store(place, load(place) * factors[part]);
    }
  }
}

// Rows of numbers, `step` apart.
struct Rows {
  const float* data;
  int64_t step;
};

// Returns `count` rows from position `first` on after the rotation, or the same rows if there is none.
template <Use use>
Rows turned(const Rotation& rotation, int64_t batch, int64_t first, int64_t count, const Rows& rows, int64_t size) {
  if (rotation.is_none()) return rows;
  float* to = scratch<use>(count * size);
  rotation.turn(batch, first, count, rows.data, rows.step, to);
  return {to, size};
}

void run_forward(
    const Problem& of, const Mask& mask, const Rotation& rotation, const float* query, const float* key,
    const float* value, float* out, float* logarithms, const Noise& noise) {
  at::parallel_for(0, of.batches * of.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t batch = item / of.heads, head = item % of.heads, shared = head / (of.heads / of.shared_heads);
      const float* q = query + batch * of.query.batch + head * of.query.head;
      const float* k = key + batch * of.key.batch + shared * of.key.head;
      const float* v = value + batch * of.value.batch + shared * of.value.head;
      float* o = out + batch * of.out.batch + head * of.out.head;
      const Rows keys = turned<Use::kKeys>(rotation, batch, 0, of.keys, {k, of.key.place}, of.size);
      for (int64_t first = 0; first < of.queries; first += kQueries) {
        const int64_t last = std::min(of.queries, first + kQueries), rows = last - first;
        const int64_t seen = mask.end(batch, head, first, last), width = padded(seen);
        float* scores = scratch<Use::kScores>(kQueries * std::max(width, kBlock));
        if (seen > 0) {
          const Rows block = turned<Use::kQueries>(
              rotation, batch, first, rows, {q + first * of.query.place, of.query.place}, of.size);
          multiply(true, false, seen, rows, of.size, of.scale, keys.data, keys.step, block.data, block.step, 0.0f,
                   scores, width);
        }
        for (int64_t row = 0; row < rows; ++row) {
          float* line = scores + row * width;
          mask.apply(line, batch, head, first + row, seen);
          const int64_t number = item * of.queries + first + row;
          logarithms[number] = softmax(line, seen, width);
          if (of.p > 0.0) drop(line, width, noise, number);
        }
        if (seen > 0) {
          multiply(false, false, of.value_size, rows, seen, 1.0f, v, of.value.place, scores, width, 0.0f,
                   o + first * of.out.place, of.out.place);
        } else {
          for (int64_t row = first; row < last; ++row) std::fill_n(o + row * of.out.place, of.value_size, 0.0f);
        }
      }
    }
  });
}

float dot(const float* x, const float* y, int64_t count) {
  Floats total = Floats{};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) total += load(x + at) * load(y + at);
  if (at < count) total += load_part(x + at, count - at) * load_part(y + at, count - at);
  return sum(total);
}

// Replaces the scores by the weights after dropout, which the forward multiplied by the values, and `slopes`, the
// gradient of these weights, by the gradient of the scores.
void differentiate(
    float* scores, float* slopes, int64_t count, int64_t width, float logarithm, float common, const Problem& of,
    const Noise& noise, uint64_t number) {
  for (int64_t at = count; at < width; ++at) {
    scores[at] = kNever;
    slopes[at] = 0.0f;
  }
  Floats factors[kParts];
  for (Floats& factor : factors) factor = all(1.0f);
  for (int64_t at = 0; at < width; at += kBlock) {
    if (of.p > 0.0) noise.block(factors, number, static_cast<uint32_t>(at / kBlock));
    for (int part = 0; part < kParts; ++part) {
      const int64_t place = at + part * kLanes;
      const Floats score = load(scores + place);
      // A hidden key has no part in a query that is NaN.
      const Floats weight = score == kNever ? Floats{} : exponential(score - logarithm);
      store(scores + place, weight * factors[part]);
      store(slopes + place, weight * (load(slopes + place) * factors[part] - common));
    }
  }
}

struct Gradients {
  float *query, *key, *value;
};

void run_backward(
    const Problem& of, const Mask& mask, const Rotation& rotation, const float* grad, const float* query,
    const float* key, const float* value, const float* out, const float* logarithms, const Noise& noise,
    const Gradients& to) {
  const int64_t group = of.heads / of.shared_heads;
  at::parallel_for(0, of.batches * of.shared_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t batch = item / of.shared_heads, shared = item % of.shared_heads;
      const float* k = key + batch * of.key.batch + shared * of.key.head;
      const float* v = value + batch * of.value.batch + shared * of.value.head;
      float* to_k = to.key + batch * of.key.batch + shared * of.key.head;
      float* to_v = to.value + batch * of.value.batch + shared * of.value.head;
      const bool rotates = !rotation.is_none();
      const Rows keys = turned<Use::kKeys>(rotation, batch, 0, of.keys, {k, of.key.place}, of.size);
      // Gradients of what was rotated are collected before they are rotated back.
      float* of_keys = rotates ? scratch<Use::kKeySlopes>(of.keys * of.size) : to_k;
      const int64_t of_keys_step = rotates ? of.size : of.key.place;
      for (int64_t place = 0; place < of.keys; ++place) {
        std::fill_n(of_keys + place * of_keys_step, of.size, 0.0f);
        std::fill_n(to_v + place * of.value.place, of.value_size, 0.0f);
      }
      for (int64_t head = shared * group; head < (shared + 1) * group; ++head) {
        const float* q = query + batch * of.query.batch + head * of.query.head;
        const float* o = out + batch * of.out.batch + head * of.out.head;
        const float* slope = grad + batch * of.out.batch + head * of.out.head;
        float* to_q = to.query + batch * of.query.batch + head * of.query.head;
        for (int64_t first = 0; first < of.queries; first += kQueries) {
          const int64_t last = std::min(of.queries, first + kQueries), rows = last - first;
          const int64_t seen = mask.end(batch, head, first, last), width = padded(seen);
          if (seen == 0) {
            for (int64_t row = first; row < last; ++row) std::fill_n(to_q + row * of.query.place, of.size, 0.0f);
            continue;
          }
          float* scores = scratch<Use::kScores>(2 * kQueries * width);
          float* slopes = scores + kQueries * width;
          const Rows block = turned<Use::kQueries>(
              rotation, batch, first, rows, {q + first * of.query.place, of.query.place}, of.size);
          const float* slope_rows = slope + first * of.out.place;
          multiply(true, false, seen, rows, of.size, of.scale, keys.data, keys.step, block.data, block.step, 0.0f,
                   scores, width);
          multiply(true, false, seen, rows, of.value_size, 1.0f, v, of.value.place, slope_rows, of.out.place, 0.0f,
                   slopes, width);
          for (int64_t row = 0; row < rows; ++row) {
            float* line = scores + row * width;
            mask.apply(line, batch, head, first + row, seen);
            const int64_t number = (batch * of.heads + head) * of.queries + first + row;
            const float common = dot(slope_rows + row * of.out.place, o + (first + row) * of.out.place, of.value_size);
            differentiate(line, slopes + row * width, seen, width, logarithms[number], common, of, noise, number);
          }
          multiply(false, true, of.value_size, seen, rows, 1.0f, slope_rows, of.out.place, scores, width, 1.0f, to_v,
                   of.value.place);
          float* of_block = rotates ? scratch<Use::kQuerySlopes>(kQueries * of.size) : to_q + first * of.query.place;
          multiply(false, false, of.size, rows, seen, of.scale, keys.data, keys.step, slopes, width, 0.0f, of_block,
                   rotates ? of.size : of.query.place);
          if (rotates) {
            rotation.turn_back(batch, first, rows, of_block, to_q + first * of.query.place, of.query.place);
          }
          multiply(false, true, of.size, seen, rows, of.scale, block.data, block.step, slopes, width, 1.0f, of_keys,
                   of_keys_step);
        }
      }
      if (rotates) rotation.turn_back(batch, 0, of.keys, of_keys, to_k, of.key.place);
    }
  });
}

double factor(std::optional<double> scale, int64_t size) {
  return scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(size));
}

// Query, key and value are [B, H, L, E], or [B, L, H, E] if `heads_axis` is 2.
Problem unpacked(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t heads_axis, double p, bool causal,
    std::optional<double> scale) {
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "attention takes tensors of rank 4");
  const int64_t heads = query.size(heads_axis), shared = key.size(heads_axis), places = 3 - heads_axis;
  TORCH_CHECK(heads % shared == 0 && shared == value.size(heads_axis), "attention: heads do not divide");
  const auto layout = heads_axis == 1 ? heads_first : places_first;
  const int64_t value_size = value.size(3), queries = query.size(places);
  const Layout out = heads_axis == 1 ? Layout{heads * queries * value_size, queries * value_size, value_size}
                                     : Layout{heads * queries * value_size, value_size, heads * value_size};
  return {query.size(0), heads, shared, queries, key.size(places), query.size(3), value_size, layout(query),
          layout(key), layout(value), out, causal, factor(scale, query.size(3)), p};
}

Problem packed_problem(const at::Tensor& x, int64_t heads, double p, bool causal, std::optional<double> scale) {
  TORCH_CHECK(x.dim() == 3 && x.scalar_type() == at::kFloat && x.size(2) % (3 * heads) == 0, "attention: wrong shape");
  const int64_t length = x.size(1), size = x.size(2) / (3 * heads);
  const Layout packed{length * x.size(2), size, x.size(2)};
  return {x.size(0), heads, heads, length, length, size, size, packed, packed, packed,
          {length * heads * size, size, heads * size}, causal, factor(scale, size), p};
}

// Makes query, key and value have the same number of batches, and key and value the same number of heads, which is at
// most the query's.
struct Aligned {
  Aligned(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t heads_axis = 1,
      int64_t batches = 1) {
    batches_ = std::max({query.size(0), key.size(0), value.size(0), batches});
    axis_ = heads_axis;
    const int64_t shared = std::max(key.size(axis_), value.size(axis_));
    this->query = expanded(query, std::max(query.size(axis_), shared));
    this->key = expanded(key, shared);
    this->value = expanded(value, shared);
  }

  at::Tensor query, key, value;

 private:
  at::Tensor expanded(const at::Tensor& x, int64_t heads) const {
    std::vector<int64_t> sizes = {batches_, -1, -1, -1};
    sizes[axis_] = heads;
    return x.expand(sizes).contiguous();
  }

  int64_t batches_, axis_;
};

plain::Request request(const Problem& of, const std::optional<at::Tensor>& mask, const Noise& noise, double scale) {
  at::Tensor factors;
  if (of.p > 0.0) {
    const int64_t width = padded(of.keys);
    factors = at::ones({of.batches, of.heads, of.queries, width}, at::kFloat);
    for (int64_t row = 0; row < of.batches * of.heads * of.queries; ++row) {
      drop(factors.data_ptr<float>() + row * width, width, noise, row);
    }
    factors = factors.narrow(3, 0, of.keys);
  }
  return {mask, factors, of.causal, scale};
}

bool is_given(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

int64_t batches_of(const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine) {
  return is_given(cosine) && is_given(sine) ? std::max(cosine->size(0), sine->size(0)) : 1;
}

void check_rotation(
    const Problem& of, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine) {
  TORCH_CHECK(is_given(cosine) == is_given(sine), "attention: cosine and sine belong together");
  if (!is_given(cosine)) return;
  for (const at::Tensor& x : {*cosine, *sine}) {
    TORCH_CHECK(
        x.dim() == 3 && (x.size(0) == 1 || x.size(0) == of.batches) && x.size(1) == of.queries &&
            x.size(1) == of.keys && x.size(2) == cosine->size(2) && x.size(2) <= of.size && x.size(2) % 2 == 0,
        "attention: the rotation has another shape than the queries and keys");
  }
}

Rotation rotation_of(
    const Problem& of, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine) {
  if (!is_given(cosine)) return Rotation();
  return Rotation(cosine->to(at::kFloat).contiguous(), sine->to(at::kFloat).contiguous(), of.size);
}

Noise noise_of(const at::Tensor& seed, double p) { return Noise(static_cast<uint64_t>(seed.item<int64_t>()), p); }

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double p, bool causal, std::optional<double> scale) {
  const Aligned in(query, key, value);
  const Problem of = unpacked(in.query, in.key, in.value, 1, p, causal, scale);
  const at::Tensor seed = draw_seed(p);
  if (query.scalar_type() != at::kFloat) {
    auto [out, logarithms] =
        plain::forward(in.query, in.key, in.value, request(of, mask, noise_of(seed, p), of.scale));
    return {out, logarithms, seed};
  }
  at::Tensor out = fresh({of.batches, of.heads, of.queries, of.value_size}, at::kFloat);
  at::Tensor logarithms = fresh({of.batches, of.heads, of.queries}, at::kFloat);
  run_forward(of, Mask(mask, of), Rotation(), in.query.const_data_ptr<float>(), in.key.const_data_ptr<float>(),
              in.value.const_data_ptr<float>(), out.data_ptr<float>(), logarithms.data_ptr<float>(), noise_of(seed, p));
  return {out, logarithms, seed};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const at::Tensor& seed, const std::optional<at::Tensor>& mask,
    double p, bool causal, std::optional<double> scale) {
  const Aligned in(query, key, value);
  const Problem of = unpacked(in.query, in.key, in.value, 1, p, causal, scale);
  if (query.scalar_type() != at::kFloat) {
    const auto [of_query, of_key, of_value] = plain::backward(
        grad, in.query, in.key, in.value, out, logarithms, request(of, mask, noise_of(seed, p), of.scale));
    return {at::sum_to(of_query, query.sizes()), at::sum_to(of_key, key.sizes()), at::sum_to(of_value, value.sizes())};
  }
  at::Tensor of_query = fresh_like(in.query), of_key = fresh_like(in.key), of_value = fresh_like(in.value);
  run_backward(of, Mask(mask, of), Rotation(), grad.const_data_ptr<float>(), in.query.const_data_ptr<float>(),
               in.key.const_data_ptr<float>(), in.value.const_data_ptr<float>(), out.const_data_ptr<float>(),
               logarithms.const_data_ptr<float>(), noise_of(seed, p),
               {of_query.data_ptr<float>(), of_key.data_ptr<float>(), of_value.data_ptr<float>()});
  // A tensor that has the right shape is returned unchanged.
  return {at::sum_to(of_query, query.sizes()), at::sum_to(of_key, key.sizes()), at::sum_to(of_value, value.sizes())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_sideways(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& cosine,
    const std::optional<at::Tensor>& sine, const std::optional<at::Tensor>& mask, double p, bool causal,
    std::optional<double> scale) {
  const Aligned in(query, key, value, 2, batches_of(cosine, sine));
  const Problem of = unpacked(in.query, in.key, in.value, 2, p, causal, scale);
  check_rotation(of, cosine, sine);
  const at::Tensor seed = draw_seed(p);
  if (query.scalar_type() != at::kFloat) {
    auto [out, logarithms] = plain::forward(
        plain::turned(in.query, cosine, sine).transpose(1, 2), plain::turned(in.key, cosine, sine).transpose(1, 2),
        in.value.transpose(1, 2), request(of, mask, noise_of(seed, p), of.scale));
    return {out.transpose(1, 2).contiguous(), logarithms, seed};
  }
  at::Tensor out = fresh({of.batches, of.queries, of.heads, of.value_size}, at::kFloat);
  at::Tensor logarithms = fresh({of.batches, of.heads, of.queries}, at::kFloat);
  run_forward(of, Mask(mask, of), rotation_of(of, cosine, sine), in.query.const_data_ptr<float>(),
              in.key.const_data_ptr<float>(), in.value.const_data_ptr<float>(), out.data_ptr<float>(),
              logarithms.data_ptr<float>(), noise_of(seed, p));
  return {out, logarithms, seed};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_sideways_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const at::Tensor& seed,
    const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine,
    const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale) {
  const Aligned in(query, key, value, 2, batches_of(cosine, sine));
  const Problem of = unpacked(in.query, in.key, in.value, 2, p, causal, scale);
  if (query.scalar_type() != at::kFloat) {
    const auto [of_query, of_key, of_value] = plain::backward(
        grad.transpose(1, 2), plain::turned(in.query, cosine, sine).transpose(1, 2),
        plain::turned(in.key, cosine, sine).transpose(1, 2), in.value.transpose(1, 2), out.transpose(1, 2), logarithms,
        request(of, mask, noise_of(seed, p), of.scale));
    return {at::sum_to(plain::turned_back(of_query.transpose(1, 2), cosine, sine), query.sizes()).contiguous(),
            at::sum_to(plain::turned_back(of_key.transpose(1, 2), cosine, sine), key.sizes()).contiguous(),
            at::sum_to(of_value.transpose(1, 2), value.sizes()).contiguous()};
  }
  at::Tensor of_query = fresh_like(in.query), of_key = fresh_like(in.key), of_value = fresh_like(in.value);
  run_backward(of, Mask(mask, of), rotation_of(of, cosine, sine), grad.const_data_ptr<float>(),
               in.query.const_data_ptr<float>(), in.key.const_data_ptr<float>(), in.value.const_data_ptr<float>(),
               out.const_data_ptr<float>(), logarithms.const_data_ptr<float>(), noise_of(seed, p),
               {of_query.data_ptr<float>(), of_key.data_ptr<float>(), of_value.data_ptr<float>()});
  return {at::sum_to(of_query, query.sizes()), at::sum_to(of_key, key.sizes()), at::sum_to(of_value, value.sizes())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_packed(
    const at::Tensor& x, const std::optional<at::Tensor>& mask, int64_t heads, double p, bool causal,
    std::optional<double> scale) {
  const Problem of = packed_problem(x, heads, p, causal, scale);
  const at::Tensor seed = draw_seed(p);
  at::Tensor out = fresh({of.batches, of.queries, heads, of.size}, at::kFloat);
  at::Tensor logarithms = fresh({of.batches, heads, of.queries}, at::kFloat);
  const float* query = x.const_data_ptr<float>();
  const int64_t step = heads * of.size;
  run_forward(of, Mask(mask, of), Rotation(), query, query + step, query + 2 * step, out.data_ptr<float>(),
              logarithms.data_ptr<float>(), noise_of(seed, p));
  return {out, logarithms, seed};
}

at::Tensor attention_packed_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& out, const at::Tensor& logarithms,
    const at::Tensor& seed, const std::optional<at::Tensor>& mask, int64_t heads, double p, bool causal,
    std::optional<double> scale) {
  const Problem of = packed_problem(x, heads, p, causal, scale);
  at::Tensor result = fresh_like(x);
  const float* query = x.const_data_ptr<float>();
  float* to = result.data_ptr<float>();
  const int64_t step = heads * of.size;
  run_backward(of, Mask(mask, of), Rotation(), grad.const_data_ptr<float>(), query, query + step, query + 2 * step,
               out.const_data_ptr<float>(), logarithms.const_data_ptr<float>(), noise_of(seed, p),
               {to, to + step, to + 2 * step});
  return result;
}

}  // namespace ortlaunch
