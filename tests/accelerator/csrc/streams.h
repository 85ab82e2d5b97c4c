// Streams that are really asynchronous: each is a thread that runs what it was given, one job after the other.
//
//     host      push(a) ── push(b) ── record ──────────────── wait: counted
//     stream 0     └─ a ──── b ●
//     stream 1                 └─ block ── c          behind b, whatever the host does meanwhile
//
// A job waits for nobody but for the jobs before it and what its stream was told to wait for. A delay makes
// some of them slow, jitter makes all of them irregular.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

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

class Stream {
 public:
  Stream(int64_t id, int device, Kind kind) : id(id), device(device), kind(kind), random_(1234 + id) {
    std::thread([this] { run(); }).detach();
  }

  const int64_t id;
  const int device;
  const Kind kind;

  void push(Job job) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      jobs_.push_back(std::move(job));
      given_++;
    }
    more_.notify_one();
  }

  // A place in this stream's order: behind all that it was given until now.
  uint64_t place() {
    std::lock_guard<std::mutex> guard(mutex_);
    return given_;
  }

  bool reached(uint64_t place) {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_ >= place;
  }

  // What this stream is given from now on comes behind that place of the other one.
  void wait_for(Stream* other, uint64_t place) {
    if (other != this) push([other, place] { other->until(place); });
  }

  // The host waits. Errors of jobs are raised here, as late as on a GPU.
  void synchronize(uint64_t place, const std::string& why) {
    host_waits.add(why);
    until(place);
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
      {
        std::unique_lock<std::mutex> lock(mutex_);
        more_.wait(lock, [&] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      int late = delays.by_kind[kind] + static_cast<int>(random_() % (delays.jitter + 1));
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
      std::string error;
      try {
        job();
        job = nullptr;  // what it holds is let go of before anybody hears that it is done
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
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
  std::deque<Job> jobs_;
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
