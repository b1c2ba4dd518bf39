#include "memory.h"

#include "state.h"

#include <torch/version.h>

#define SIM_DEVICE_ALLOCATOR (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9)
#if SIM_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

namespace sim {
namespace {

constexpr size_t kAlign = 64;
constexpr int kPoison = 0xFF;

struct Live {
  std::atomic<int64_t> blocks{0}, bytes{0};
};

std::array<Live, kMaxDevices> live;

// What a device storage's DataPtr owns.
struct Block {
  std::shared_ptr<Memory> memory;
  StreamIndex owner;
  std::set<StreamIndex> recorded;  // under the gate
};

// By stream, the freed memory that its next allocation is to judge. Under the gate.
auto* const freed_by_stream = new std::unordered_map<StreamIndex, std::vector<Freed>>;

Live& live_of(StreamIndex owner) {
  return live[stream_at(owner).device_index()];
}

void judge_freed(const Gate& gate, StreamIndex stream) {
  const auto found = freed_by_stream->find(stream);
  if (found == freed_by_stream->end()) return;
  for (const auto& freed : found->second) report_reuse(gate, stream, freed);
  freed_by_stream->erase(found);
}

// Poisons the memory when the last stream that may use it has run what it had queued: each of them holds this.
class Ending {
 public:
  explicit Ending(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  ~Ending() { memory_->poison(); }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

 private:
  std::shared_ptr<Memory> memory_;
};

void release_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  const auto bytes = block->memory->bytes();
  --live_of(block->owner).blocks;
  live_of(block->owner).bytes -= static_cast<int64_t>(bytes);

  const auto ending = std::make_shared<Ending>(block->memory);
  const Gate gate;
  auto accesses = block->memory->history.take_unordered(gate, block->owner, block->recorded);
  if (!accesses.empty()) (*freed_by_stream)[block->owner].push_back({bytes, std::move(accesses)});
  block->recorded.insert(block->owner);
  for (const auto stream : block->recorded) {
    if (has_queue(gate, stream)) run_after(gate, stream, [ending] {});
  }
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

#if SIM_DEVICE_ALLOCATOR
struct SimAllocator final : c10::DeviceAllocator {
  // What torch.accelerator's memory functions ask for; there is no cache, so "reserved" is "allocated".
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_on_stream(data, stream); }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_ordinal(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0].current = live[index].blocks;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = live[index].bytes;
    return stats;
  }
#else
struct SimAllocator final : c10::Allocator {
#endif
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Page-locked host memory: ordinary memory whose addresses are remembered. A copy that was put off holds it, so
// that it is not handed out again before the copy has run.
struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex mutex;
  static inline auto* const memory = new std::unordered_map<const void*, std::shared_ptr<Memory>>;

  static void release(void* data) {
    std::shared_ptr<Memory> ended;
    const std::lock_guard<std::mutex> hold(mutex);
    const auto found = memory->find(data);
    ended.swap(found->second);
    memory->erase(found);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto fresh = std::make_shared<Memory>(bytes);
    void* data = fresh->data();
    const std::lock_guard<std::mutex> hold(mutex);
    memory->emplace(data, std::move(fresh));
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Never destroyed: tensors may outlive the static objects of this library.
auto* const sim_allocator = new SimAllocator;
auto* const the_pinned_allocator = new PinnedAllocator;
REGISTER_ALLOCATOR(kSim, sim_allocator)

}  // namespace

// ---------------------------------------------------------------- bytes

Memory::Memory(size_t bytes)
    : data_(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign)), bytes_(bytes) {
  TORCH_CHECK(data_ != nullptr, "sim out of memory: tried to allocate ", bytes, " bytes");
  poison();
}

Memory::~Memory() {
  std::free(data_);
}

void Memory::poison() {
  std::memset(data_, kPoison, bytes_);
}

// ---------------------------------------------------------------- blocks

c10::Allocator* device_allocator() {
  return sim_allocator;
}

c10::Allocator* pinned_allocator() {
  return the_pinned_allocator;
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes) {
  const c10::Device device(kSim, index);
  if (bytes == 0) return {nullptr, device};
  const auto owner = index_of(current_stream(index));
  auto memory = std::make_shared<Memory>(bytes);
  void* data = memory->data();
  ++live_of(owner).blocks;
  live_of(owner).bytes += static_cast<int64_t>(bytes);
  const Gate gate;
  judge_freed(gate, owner);
  return {data, new Block{std::move(memory), owner, {}}, &release_block, device};
}

void record_on_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  const auto index = index_of(stream);
  const Gate gate;
  if (auto* block = block_of(data)) block->recorded.insert(index);
}

std::shared_ptr<Memory> pinned_memory(const void* data) {
  const std::lock_guard<std::mutex> hold(PinnedAllocator::mutex);
  const auto found = PinnedAllocator::memory->find(data);
  return found == PinnedAllocator::memory->end() ? nullptr : found->second;
}

std::shared_ptr<Memory> memory_of(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  if (!on_sim(tensor)) return pinned_memory(data.get());
  const auto* block = block_of(data);
  return block == nullptr ? nullptr : block->memory;
}

void replace_memory(const c10::Storage& storage, const void* source, size_t bytes) {
  auto block = allocate_on(storage.device().index(), bytes);
  if (bytes != 0) std::memcpy(block.get(), source, bytes);
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(bytes);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const auto device = storage.device().index();
  auto block = allocate_on(device, bytes);
  const auto *from = block_of(storage.data_ptr()), *to = block_of(block);
  if (const size_t kept = std::min(storage.nbytes(), bytes); from != nullptr && kept != 0) {
    const Gate gate;
    const auto moment = launch(gate, index_of(current_stream(device)));
    std::memcpy(to->memory->data(), from->memory->data(), kept);
    const auto* name = operator_name(gate, "a resize");
    from->memory->history.add(gate, {Footprint(kept), moment, false, name});
    to->memory->history.add(gate, {Footprint(kept), moment, true, name});
  }
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(bytes);
}

std::vector<std::pair<int64_t, int64_t>> read_memory() {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (int i = 0; i < device_count; ++i) result.emplace_back(live[i].blocks, live[i].bytes);
  return result;
}

}  // namespace sim
