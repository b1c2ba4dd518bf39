// Streams: which work comes before which, and which work is still put off.
//
// Kernels run when they are issued, so nothing here makes anything parallel. What it does is to keep book of the
// order a program may rely on, which is less than the order things happen in. Each stream has
//
// * a clock, which says how much of every stream's work comes before the next work of this one. An event is a
//   copy of it, waiting for an event takes the greater of the two. The host has a clock too: synchronising makes
//   it learn a stream's, and all work that is issued later comes after what the host knows.
// * a queue of the copies that were put off, with the waits and the freed memory that stand between them. It is
//   run as late as can be: before the stream's next kernel, or when somebody waits for it.
//
// This layer knows neither tensors nor memory.

#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int kPooled = 32, kUrgent = 8;
constexpr int kStreamsPerDevice = 1 + kPooled + kUrgent;  // the default one, and a pool for either priority

// The streams of all devices, numbered through.
using StreamIndex = int;

void start_streams();  // once it is known how many devices there are
StreamIndex index_of(const c10::Stream& stream);
c10::Stream stream_at(StreamIndex stream);
std::string name_of(StreamIndex stream);

c10::Stream current_stream(c10::DeviceIndex device);  // of the calling thread
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream pool_stream(c10::DeviceIndex device, bool urgent);

// Held while queues, clocks and accesses are looked at or changed, and while a queue is run; not while a kernel
// runs. Functions that take one need it held. Nothing may take it twice: no tensor may be let go of under it.
class Gate {
 public:
  Gate() : hold_(mutex()) {}

 private:
  static std::mutex& mutex();
  std::lock_guard<std::mutex> hold_;
};

// One piece of work.
struct Moment {
  StreamIndex stream;
  uint64_t tick;
};

class Clock {
 public:
  explicit Clock(size_t streams) : ticks_(streams, 0) {}
  bool knows(const Moment& moment) const { return ticks_[moment.stream] >= moment.tick; }
  Moment tick(StreamIndex stream) { return {stream, ++ticks_[stream]}; }
  void learn(const Clock& other) {
    for (size_t i = 0; i < ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::vector<uint64_t> ticks_;  // by stream, how many pieces of work
};

// What a stream had been given to do at some time.
struct Event {
  Clock clock;
  StreamIndex stream;
  uint64_t position;  // in the stream's queue
  std::chrono::steady_clock::time_point time;
};

Moment launch(const Gate&, StreamIndex stream);  // a kernel: all the stream has put off is run, then the caller runs it
Moment postpone(const Gate&, StreamIndex stream, std::function<void()> work);
void run_after(const Gate&, StreamIndex stream, std::function<void()> work);  // no piece of work: it has no moment

Event record(const Gate&, StreamIndex stream);
void wait(const Gate&, StreamIndex stream, const Event& event);
void synchronize(const Gate&, const Event& event);
void synchronize(const Gate&, StreamIndex stream);

bool has_queue(const Gate&, StreamIndex stream);
bool comes_before(const Gate&, const Moment& moment, StreamIndex stream);  // the stream's next piece of work
bool is_over(const Gate&, const Moment& moment);  // the host knows it

}  // namespace sim
