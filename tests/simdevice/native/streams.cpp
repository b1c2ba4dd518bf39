#include "streams.h"

#include "state.h"

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

namespace sim {
namespace {

// A queue is not let grow beyond this, so that memory and the depth of waits within waits are bounded.
constexpr size_t kLongestQueue = 1000;

struct Position {
  StreamIndex stream;
  uint64_t count;  // of entries
};

struct Entry {
  std::optional<Position> awaited;  // either this
  std::function<void()> work;       // or that
};

struct Timeline {
  Clock clock;
  std::deque<Entry> queue;
  uint64_t done = 0;  // entries that have left the queue
  uint64_t position() const { return done + queue.size(); }
};

struct Schedule {
  std::vector<Timeline> streams;
  Clock host;
};

// Never destroyed: threads of torch's may outlive the static objects of this library.
Schedule* schedule = nullptr;

std::array<std::atomic<unsigned>, kMaxDevices> handed_out, handed_out_urgent;
thread_local std::array<c10::StreamId, kMaxDevices> current_ids{};

Timeline& timeline(StreamIndex stream) {
  return schedule->streams[stream];
}

// Ends, since an event that is waited for was recorded before the wait.
void run_until(const Position& end) {
  auto& stream = timeline(end.stream);
  while (stream.done < end.count) {
    const auto entry = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (entry.awaited) run_until(*entry.awaited);
    if (entry.work) entry.work();
    ++stream.done;
  }
}

void run_all(StreamIndex stream) {
  run_until({stream, timeline(stream).position()});
}

void append(StreamIndex stream, Entry entry) {
  timeline(stream).queue.push_back(std::move(entry));
  if (timeline(stream).queue.size() > kLongestQueue) run_all(stream);
}

bool is_done(const Position& position) {
  return timeline(position.stream).done >= position.count;
}

Moment begin(StreamIndex stream) {
  auto& clock = timeline(stream).clock;
  clock.learn(schedule->host);
  return clock.tick(stream);
}

}  // namespace

std::mutex& Gate::mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

void start_streams() {
  const size_t count = static_cast<size_t>(device_count) * kStreamsPerDevice;
  schedule = new Schedule{{}, Clock(count)};
  for (size_t i = 0; i < count; ++i) schedule->streams.push_back({Clock(count), {}, 0});
}

// ---------------------------------------------------------------- names of streams

StreamIndex index_of(const c10::Stream& stream) {
  check_ordinal(stream.device_index());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreamsPerDevice, "sim error: invalid stream ", stream);
  return static_cast<StreamIndex>(stream.device_index() * kStreamsPerDevice + stream.id());
}

c10::Stream stream_at(StreamIndex stream) {
  const c10::Device device(kSim, static_cast<c10::DeviceIndex>(stream / kStreamsPerDevice));
  return c10::Stream(c10::Stream::UNSAFE, device, stream % kStreamsPerDevice);
}

std::string name_of(StreamIndex stream) {
  const auto device = std::to_string(stream / kStreamsPerDevice);
  const auto id = stream % kStreamsPerDevice;
  return (id == 0 ? "the default stream" : "stream " + std::to_string(id)) + " of sim:" + device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_ordinal(device);
  return c10::Stream(c10::Stream::UNSAFE, {kSim, device}, current_ids[device]);
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  index_of(stream);  // which checks it
  const auto previous = current_stream(stream.device_index());
  current_ids[stream.device_index()] = stream.id();
  return previous;
}

c10::Stream pool_stream(c10::DeviceIndex device, bool urgent) {
  check_ordinal(device);
  const auto id = urgent ? 1 + kPooled + handed_out_urgent[device]++ % kUrgent : 1 + handed_out[device]++ % kPooled;
  return c10::Stream(c10::Stream::UNSAFE, {kSim, device}, id);
}

// ---------------------------------------------------------------- work

Moment launch(const Gate&, StreamIndex stream) {
  run_all(stream);
  return begin(stream);
}

Moment postpone(const Gate&, StreamIndex stream, std::function<void()> work) {
  const auto moment = begin(stream);
  append(stream, {std::nullopt, std::move(work)});
  return moment;
}

void run_after(const Gate&, StreamIndex stream, std::function<void()> work) {
  append(stream, {std::nullopt, std::move(work)});
}

Event record(const Gate&, StreamIndex stream) {
  const auto& line = timeline(stream);
  return {line.clock, stream, line.position(), std::chrono::steady_clock::now()};
}

void wait(const Gate&, StreamIndex stream, const Event& event) {
  timeline(stream).clock.learn(event.clock);
  const Position awaited{event.stream, event.position};
  if (event.stream != stream && !is_done(awaited)) append(stream, {awaited, nullptr});
}

void synchronize(const Gate&, const Event& event) {
  run_until({event.stream, event.position});
  schedule->host.learn(event.clock);
}

void synchronize(const Gate&, StreamIndex stream) {
  run_all(stream);
  schedule->host.learn(timeline(stream).clock);
}

bool has_queue(const Gate&, StreamIndex stream) {
  auto& line = timeline(stream);
  while (!line.queue.empty() && line.queue.front().awaited && is_done(*line.queue.front().awaited)) {
    line.queue.pop_front();
    ++line.done;
  }
  return !line.queue.empty();
}

bool comes_before(const Gate&, const Moment& moment, StreamIndex stream) {
  return timeline(stream).clock.knows(moment) || schedule->host.knows(moment);
}

bool is_over(const Gate&, const Moment& moment) {
  return schedule->host.knows(moment);
}

}  // namespace sim
