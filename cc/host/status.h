// status.h: how a call ended, in the terms of every back end; ffi/ turns it into XLA's.
#pragma once

namespace jax_megamoe::host {

enum class CallStatus { kOk, kInvalidArgument, kDeadlineExceeded, kUnavailable };

}  // namespace jax_megamoe::host
