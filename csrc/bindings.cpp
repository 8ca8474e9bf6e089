// The Python module shardopt._host: checks buffers, releases the GIL, calls the level asked for.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace nb = nanobind;

namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Span {
    const char *name;
    const float *data;
    std::size_t numel;
};

void require_same_length(const Span (&spans)[4]) {
    for (const Span &span : spans)
        if (span.numel != spans[0].numel)
            throw std::invalid_argument(std::string(span.name) + " has " + std::to_string(span.numel) + " elements, " +
                                        spans[0].name + " has " + std::to_string(spans[0].numel) +
                                        "; they must be equal");
}

// Overlapping buffers would make the result depend on the ISA level's width.
void require_disjoint(const Span (&spans)[4]) {
    for (const Span &a : spans)
        for (const Span &b : spans)
            if (&a < &b && a.data < b.data + b.numel && b.data < a.data + a.numel)
                throw std::invalid_argument(std::string(a.name) + " and " + b.name +
                                            " share memory; each needs its own");
}

void adamw_step(Floats param, ConstFloats grad, Floats exp_avg, Floats exp_avg_sq, float param_scale, float grad_weight,
                float beta2, float square_weight, float step_size, float bias_correction, float eps,
                const std::string &isa) {
    const shardopt::AdamWStep step = shardopt::adamw_step_for(isa);
    const Span spans[4] = {{"param", param.data(), param.size()},
                           {"grad", grad.data(), grad.size()},
                           {"exp_avg", exp_avg.data(), exp_avg.size()},
                           {"exp_avg_sq", exp_avg_sq.data(), exp_avg_sq.size()}};
    require_same_length(spans);
    require_disjoint(spans);
    const shardopt::AdamWBuffers buffers{param.data(), grad.data(), exp_avg.data(), exp_avg_sq.data(),
                                         static_cast<std::int64_t>(param.size())};
    const shardopt::AdamWScalars scalars{param_scale, grad_weight,     beta2, square_weight,
                                         step_size,   bias_correction, eps};
    nb::gil_scoped_release released;
    step(buffers, scalars);
}

}  // namespace

NB_MODULE(_host, module) {
    module.doc() = "Host kernels of shardopt; use shardopt.swap.host_kernel, which checks and documents them.";
    module.def("available_isas", &shardopt::available_isas);
    module.def("adamw_step", &adamw_step, nb::arg("param").noconvert(), nb::arg("grad").noconvert(),
               nb::arg("exp_avg").noconvert(), nb::arg("exp_avg_sq").noconvert(), nb::kw_only(), nb::arg("param_scale"),
               nb::arg("grad_weight"), nb::arg("beta2"), nb::arg("square_weight"), nb::arg("step_size"),
               nb::arg("bias_correction"), nb::arg("eps"), nb::arg("isa"));
}
