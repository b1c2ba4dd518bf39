// The race detector: what each piece of memory was last used for, and whether a new use comes after that.
//
// It judges the order a program asked for (see streams.h), not the order things happened in, and so finds the same
// races in every run.

#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// The bytes of its storage that a tensor takes.
class Footprint {
 public:
  explicit Footprint(const at::Tensor& tensor);
  explicit Footprint(size_t bytes) : begin_(0), end_(static_cast<int64_t>(bytes)), run_(end_) {}  // the first ones
  bool empty() const { return begin_ == end_; }
  bool overlaps(const Footprint& other) const;
  bool covers(const Footprint& other) const;

 private:
  struct Dimension {
    int64_t size, stride;
    bool operator==(const Dimension& other) const { return size == other.size && stride == other.stride; }
  };

  template <typename Visit>
  void visit_runs(const Visit& visit, int64_t from, size_t depth) const;

  int64_t begin_, end_;
  int64_t run_;                        // bytes that lie together,
  std::vector<Dimension> dimensions_;  // repeated so; none when all of it lies together
};

struct Access {
  Footprint bytes;
  Moment moment;
  bool writes;
  const std::string* name;  // of the operator, see operator_name
};

// The accesses to one piece of memory that a later one may have to come after.
class History {
 public:
  void add(const Gate& gate, Access access);
  // Moves out the accesses that do not come before the next work of a stream, nor belong to some others or come
  // before their next work.
  std::vector<Access> take_unordered(const Gate& gate, StreamIndex stream, const std::set<StreamIndex>& besides);

 private:
  std::vector<Access> accesses_;
};

// Memory of a stream that was freed while other streams may have been using it.
struct Freed {
  size_t bytes;
  std::vector<Access> accesses;
};

void report_reuse(const Gate& gate, StreamIndex stream, const Freed& freed);

const std::string* operator_name(const Gate&, const std::string& name);  // the same string, kept for good
std::vector<std::string> read_races();
void reset_races();

}  // namespace sim
