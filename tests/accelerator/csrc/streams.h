// Streams that are really asynchronous: each is a thread that runs what it was given, one job after the other.
//
//     host      push(a) ── push(b) ── record ──────────────── wait: counted
//     stream 0     └─ a ──── b ●
//     stream 1                 └─ block ── c          behind b, whatever the host does meanwhile
//
// A job waits for nobody but for the jobs before it and what its stream was told to wait for. A delay makes
// some of them slow, jitter makes all of them irregular.
//
// Beside them is a clock of what jobs would take by `Rates`, in seconds. It is known as a job is given: a job begins
// when the one before it has ended, what its stream waits for has, and the host has given it. The host takes no time but
// where it waits. So the clock's numbers are the same in every run, however long anything takes.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace sim {

using Job = std::function<void()>;

constexpr int kDevices = 2;

// While the host waits, jobs that are written in Python must go on.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

// How often the host has waited for a device, by what made it wait.
class HostWaits {
 public:
  void add(const std::string& why) {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_[why]++;
  }
  std::map<std::string, long> take() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::map<std::string, long> taken;
    taken.swap(counts_);
    return taken;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, long> counts_;
};

inline HostWaits host_waits;
// Who has made a stream: the device (the default ones), a process group, or a program.
enum Kind { kComputing, kLink, kOwn, kKinds };

// How late each job is, in microseconds: by the kind of its stream, and up to how much more by chance.
struct Delays {
  std::atomic<int> by_kind[kKinds] = {0, 0, 0}, jitter{0};
};

inline Delays delays;

// Per second; 0: any number in no time. `paced`: jobs really last as long.
struct Rates {
  std::atomic<double> flops{0}, copied_bytes{0}, link_bytes{0};
  std::atomic<bool> paced{false};
};

inline Rates rates;

inline double seconds(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

// A job that takes time, on the clock.
struct Span {
  std::string what;
  int64_t stream;
  double start, end;
};

// The host's time, and what took any. One mutex for all: threads of the host take turns.
class Clock {
 public:
  double now() {
    std::lock_guard<std::mutex> guard(mutex_);
    return now_;
  }
  void pass(double until) {
    std::lock_guard<std::mutex> guard(mutex_);
    now_ = std::max(now_, until);
  }
  void note(Span span) {
    std::lock_guard<std::mutex> guard(mutex_);
    spans_.push_back(std::move(span));
  }
  std::vector<Span> take() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Span> taken;
    taken.swap(spans_);
    return taken;
  }

 private:
  std::mutex mutex_;
  double now_ = 0;
  std::vector<Span> spans_;
};

inline Clock timed;

class Stream {
 public:
  Stream(int64_t id, int device, Kind kind) : id(id), device(device), kind(kind), random_(1234 + id) {
    std::thread([this] { run(); }).detach();
  }

  const int64_t id;
  const int device;
  const Kind kind;

  // `cost`: seconds that it takes on the clock, none before `behind`; `what`: its name there.
  void push(Job job, double cost = 0, const std::string& what = "", double behind = 0) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      double start = std::max({ends_.back(), behind, timed.now()});
      ends_.push_back(start + cost);
      if (cost > 0) timed.note({what, id, start, start + cost});
      jobs_.push_back({std::move(job), rates.paced ? cost : 0});
      given_++;
    }
    more_.notify_one();
  }

  // A place in this stream's order: behind all that it was given until now.
  uint64_t place() {
    std::lock_guard<std::mutex> guard(mutex_);
    return given_;
  }

  // When it has come there, on the clock.
  double end(uint64_t place) {
    std::lock_guard<std::mutex> guard(mutex_);
    return ends_.at(place);
  }

  bool reached(uint64_t place) {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_ >= place;
  }

  // What this stream is given from now on comes behind that place of the other one.
  void wait_for(Stream* other, uint64_t place) {
    if (other != this) push([other, place] { other->until(place); }, 0, "", other->end(place));
  }

  // The host waits. Errors of jobs are raised here, as late as on a GPU.
  void synchronize(uint64_t place, const std::string& why) {
    host_waits.add(why);
    until(place);
    timed.pass(end(place));
    std::string error;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      error.swap(error_);
    }
    TORCH_CHECK(error.empty(), "a job of stream ", id, " has failed: ", error);
  }

 private:
  void until(uint64_t place) {
    WithoutGil without;
    std::unique_lock<std::mutex> lock(mutex_);
    through_.wait(lock, [&] { return done_ >= place; });
  }

  void run() {
    for (;;) {
      Job job;
      double lasts;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        more_.wait(lock, [&] { return !jobs_.empty(); });
        std::tie(job, lasts) = std::move(jobs_.front());
        jobs_.pop_front();
      }
      int late = delays.by_kind[kind] + static_cast<int>(random_() % (delays.jitter + 1));
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
      auto through = std::chrono::steady_clock::now() + std::chrono::duration<double>(lasts);
      std::string error;
      try {
        job();
        job = nullptr;  // what it holds is let go of before anybody hears that it is done
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
      if (lasts > 0) std::this_thread::sleep_until(through);
      {
        std::lock_guard<std::mutex> guard(mutex_);
        if (error_.empty()) error_ = error;
        done_++;
      }
      through_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_, through_;
  std::deque<std::pair<Job, double>> jobs_;
  std::vector<double> ends_ = {0};  // by place
  uint64_t given_ = 0, done_ = 0;
  std::string error_;
  std::mt19937 random_;
};

// All streams. They are never freed: a job of one may wait for another until the process ends.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < kDevices; device++) make(device, kComputing);  // the default streams: stream d of device d
  }
  Stream* make(int device, Kind kind) {
    std::lock_guard<std::mutex> guard(mutex_);
    all_.push_back(new Stream(static_cast<int64_t>(all_.size()), device, kind));
    return all_.back();
  }
  Stream* at(int64_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    return all_.at(id);
  }
  std::vector<Stream*> of(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Stream*> found;
    for (Stream* stream : all_)
      if (stream->device == device) found.push_back(stream);
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<Stream*> all_;
};

inline Streams& streams() {
  static Streams* all = new Streams;  // made when first asked for: a process that forks before has no threads
  return *all;
}

// Of each thread of the host: its device, and the current stream of each device.
struct Current {
  int device = 0;
  int64_t stream[kDevices] = {0, 1};
};

inline thread_local Current current;

inline Stream* current_stream(int device) { return streams().at(current.stream[device]); }

}  // namespace sim
