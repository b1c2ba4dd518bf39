#include "races.h"

#include <algorithm>
#include <unordered_set>

namespace sim {
namespace {

constexpr size_t kMostRaces = 20;
// A longer history forgets its older half: a race may then go unseen, but none is made up.
constexpr size_t kLongestHistory = 4096;

// Never destroyed, as the other state of this library.
auto* const races = new std::vector<std::string>;
auto* const names = new std::unordered_set<std::string>;

void report(std::string sentence) {
  if (races->size() < kMostRaces && std::find(races->begin(), races->end(), sentence) == races->end()) {
    races->push_back(std::move(sentence));
  }
}

std::string describe(const Access& access) {
  return *access.name + " on " + name_of(access.moment.stream);
}

void report_race(const Access& earlier, const Access& later) {
  report(
      describe(later) + (later.writes ? " overwrites" : " reads") + " what " + describe(earlier) +
      (earlier.writes ? " wrote" : " read") + ", and nothing orders the two: an event is missing");
}

// Whether an older access need not be remembered beside a newer one: who comes after the newer comes after it.
bool supersedes(const Access& newer, const Access& older) {
  const bool same_kind = !older.writes && newer.moment.stream == older.moment.stream;
  return (newer.writes || same_kind) && newer.bytes.covers(older.bytes);
}

}  // namespace

// ---------------------------------------------------------------- bytes

Footprint::Footprint(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.itemsize());
  begin_ = end_ = tensor.storage_offset() * item;
  run_ = item;
  if (tensor.numel() == 0) return;
  end_ += item;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const Dimension dimension{tensor.size(i), tensor.stride(i) * item};
    if (dimension.size == 1 || dimension.stride == 0) continue;
    end_ += (dimension.size - 1) * dimension.stride;
    dimensions_.push_back(dimension);
  }
  std::sort(dimensions_.begin(), dimensions_.end(), [](const Dimension& a, const Dimension& b) {
    return a.stride < b.stride;
  });
  auto repeated = dimensions_.begin();
  for (; repeated != dimensions_.end() && repeated->stride == run_; ++repeated) run_ *= repeated->size;
  dimensions_.erase(dimensions_.begin(), repeated);
}

template <typename Visit>
void Footprint::visit_runs(const Visit& visit, int64_t from, size_t depth) const {
  if (depth == 0) return visit(from, from + run_);
  const auto& dimension = dimensions_[depth - 1];
  for (int64_t i = 0; i < dimension.size; ++i) visit_runs(visit, from + i * dimension.stride, depth - 1);
}

bool Footprint::overlaps(const Footprint& other) const {
  const auto begin = std::max(begin_, other.begin_), end = std::min(end_, other.end_);
  if (begin >= end) return false;
  if (dimensions_.empty() && other.dimensions_.empty()) return true;
  std::vector<bool> mine(end - begin);
  visit_runs(
      [&](int64_t from, int64_t to) {
        for (auto i = std::max(from, begin); i < std::min(to, end); ++i) mine[i - begin] = true;
      },
      begin_, dimensions_.size());
  bool found = false;
  other.visit_runs(
      [&](int64_t from, int64_t to) {
        for (auto i = std::max(from, begin); !found && i < std::min(to, end); ++i) found = mine[i - begin];
      },
      other.begin_, other.dimensions_.size());
  return found;
}

bool Footprint::covers(const Footprint& other) const {
  if (dimensions_.empty()) return begin_ <= other.begin_ && other.end_ <= end_;
  return begin_ == other.begin_ && end_ == other.end_ && run_ == other.run_ && dimensions_ == other.dimensions_;
}

// ---------------------------------------------------------------- accesses

void History::add(const Gate& gate, Access access) {
  if (access.bytes.empty()) return;
  const auto is_settled = [&](const Access& earlier) {
    if (is_over(gate, earlier.moment)) return true;
    if ((earlier.writes || access.writes) && !comes_before(gate, earlier.moment, access.moment.stream) &&
        earlier.bytes.overlaps(access.bytes)) {
      report_race(earlier, access);
    }
    return supersedes(access, earlier);
  };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_settled), accesses_.end());
  if (accesses_.size() >= kLongestHistory) accesses_.erase(accesses_.begin(), accesses_.begin() + kLongestHistory / 2);
  accesses_.push_back(std::move(access));
}

std::vector<Access> History::take_unordered(
    const Gate& gate, StreamIndex stream, const std::set<StreamIndex>& besides) {
  // What a recorded stream has waited for is over too when that stream is done.
  const auto is_harmless = [&](const Access& access) {
    return besides.count(access.moment.stream) != 0 || comes_before(gate, access.moment, stream) ||
        std::any_of(besides.begin(), besides.end(), [&](StreamIndex recorded) {
          return comes_before(gate, access.moment, recorded);
        });
  };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_harmless), accesses_.end());
  return std::move(accesses_);
}

void report_reuse(const Gate& gate, StreamIndex stream, const Freed& freed) {
  for (const auto& access : freed.accesses) {
    if (comes_before(gate, access.moment, stream)) continue;
    report(
        std::to_string(freed.bytes) + " bytes of " + name_of(stream) + " were freed while " + describe(access) +
        " may still " + (access.writes ? "write" : "read") + " them: record_stream or an event is missing");
  }
}

// ---------------------------------------------------------------- reading

const std::string* operator_name(const Gate&, const std::string& name) {
  return &*names->insert(name).first;
}

std::vector<std::string> read_races() {
  const Gate gate;
  return *races;
}

void reset_races() {
  const Gate gate;
  races->clear();
}

}  // namespace sim
