// What Python is given: tests/accelerator/device.py and group.py call it. Streams go by their number.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace py = pybind11;

namespace {

// A job in Python. The function is let go of where the GIL is held.
void push(int64_t stream, py::function call, double link_bytes) {
  auto* held = new py::function(std::move(call));
  auto job = [held] {
    py::gil_scoped_acquire gil;
    std::string error;
    try {
      (*held)();
    } catch (py::error_already_set& e) {
      error = e.what();
    }
    delete held;
    TORCH_CHECK(error.empty(), error);
  };
  sim::streams().at(stream)->push(job, sim::seconds(link_bytes, sim::rates.link_bytes), "link");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(sim::kDevice, &sim::device_allocator);
  at::RegisterPrivateUse1HooksInterface(&sim::hooks);
  module.attr("devices") = sim::kDevices;
  module.def("as_host", &sim::as_host);
  module.def("push", &push, py::arg("stream"), py::arg("call"), py::arg("link_bytes") = 0);
  module.def("current_stream", [](int device) { return sim::current_stream(device)->id; });
  module.def("new_stream", [](int device) { return sim::streams().make(device, sim::kLink)->id; });
  module.def("place", [](int64_t stream) { return sim::streams().at(stream)->place(); });
  module.def("wait_for", [](int64_t stream, int64_t other, uint64_t place) {
    sim::streams().at(stream)->wait_for(sim::streams().at(other), place);
  });
  module.def("synchronize", [](int64_t stream, uint64_t place, const std::string& why) {
    sim::streams().at(stream)->synchronize(place, why);
  });
  module.def("set_delays", [](int computing, int link, int own, int jitter) {
    sim::delays.by_kind[sim::kComputing] = computing;
    sim::delays.by_kind[sim::kLink] = link;
    sim::delays.by_kind[sim::kOwn] = own;
    sim::delays.jitter = jitter;
  });
  module.def("set_rates", [](double flops, double copied_bytes, double link_bytes, bool paced) {
    sim::rates.flops = flops;
    sim::rates.copied_bytes = copied_bytes;
    sim::rates.link_bytes = link_bytes;
    sim::rates.paced = paced;
  });
  module.def("now", [] { return sim::timed.now(); });
  module.def("take_spans", [] {
    std::vector<std::tuple<std::string, int64_t, double, double>> found;
    for (const sim::Span& span : sim::timed.take()) found.emplace_back(span.what, span.stream, span.start, span.end);
    return found;
  });
  module.def("in_use", [] {
    auto [blocks, asked] = sim::device_allocator.in_use();
    return std::make_tuple(blocks.now, blocks.most, asked.now, asked.most);
  });
  module.def("reset_peak", [] { sim::device_allocator.reset_peak(); });
  module.def("take_host_waits", [] { return sim::host_waits.take(); });
}
