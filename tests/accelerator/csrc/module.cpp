// What Python is given: tests/accelerator/device.py and group.py call it. Streams go by their number.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace py = pybind11;

namespace {

// A job in Python. The function is let go of where the GIL is held.
void push(int64_t stream, py::function call) {
  auto* held = new py::function(std::move(call));
  sim::streams().at(stream)->push([held] {
    py::gil_scoped_acquire gil;
    std::string error;
    try {
      (*held)();
    } catch (py::error_already_set& e) {
      error = e.what();
    }
    delete held;
    TORCH_CHECK(error.empty(), error);
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(sim::kDevice, &sim::device_allocator);
  at::RegisterPrivateUse1HooksInterface(&sim::hooks);
  module.attr("devices") = sim::kDevices;
  module.def("as_host", &sim::as_host);
  module.def("push", &push);
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
  module.def("take_host_waits", [] { return sim::host_waits.take(); });
}
