// Errors inside the library: thrown anywhere below api.cpp, turned into a status and a sentence there.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <string>

namespace linattn {

// Same numbers as linattn_status.
enum class Status { Ok = 0, Value = 1, Type = 2, Unsupported = 3, Runtime = 4 };

struct Error : std::exception {
    Status status;
    std::string text;
    Error(Status s, std::string t) : status(s), text(std::move(t)) {}
    const char *what() const noexcept override { return text.c_str(); }
};

// Throws Error with a printf-style sentence.
[[noreturn]] inline void __attribute__((format(printf, 2, 3))) fail(Status status, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    throw Error(status, text);
}

}  // namespace linattn
