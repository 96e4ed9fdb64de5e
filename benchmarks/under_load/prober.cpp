// Sends a request so many times a second for a while, pauses as long, and so on until it is ended:
// prober ADDRESS PORT REQUEST PER_SECOND SECONDS. A line of begin, end (seconds of the monotonic clock)
// and number of requests after each while. A program of its own, as the server's processors are ours;
// it wakes once for a request, and reads an answer before the next one is sent.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void sleep_until(double moment) {
  timespec t;
  t.tv_sec = static_cast<time_t>(moment);
  t.tv_nsec = static_cast<long>(1e9 * (moment - static_cast<double>(t.tv_sec)));
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

[[noreturn]] void fail(const char *what, const char *told) {
  std::fprintf(stderr, "%s: %s\n", what, told);
  std::exit(1);
}

}  // namespace

int main(int count, char **words) {
  if (count != 6) fail("prober", "ADDRESS PORT REQUEST PER_SECOND SECONDS");
  const char *request = words[3];
  const double per_second = std::atof(words[4]), seconds = std::atof(words[5]);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(words[2])));
  const int connection = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (inet_pton(AF_INET, words[1], &to.sin_addr) != 1 ||
      connect(connection, reinterpret_cast<sockaddr *>(&to), sizeof to) != 0)
    fail(words[1], "no connection");
  const size_t length = std::strlen(request);
  const auto read_answer = [&] {  // head and body may come in pieces
    char answer[4096];
    size_t held = 0;
    for (;;) {
      const ssize_t received = recv(connection, answer + held, sizeof answer - 1 - held, 0);
      if (received <= 0) fail("prober", "the server has left");
      answer[held += static_cast<size_t>(received)] = 0;
      if (std::strncmp(answer, "HTTP/1.1 200", 12) != 0) fail("prober", answer);
      const char *body = std::strstr(answer, "\r\n\r\n");
      const char *length = strcasestr(answer, "content-length:");
      if (body == nullptr || length == nullptr) continue;
      const auto size = static_cast<size_t>(body + 4 - answer) + std::strtoul(length + 15, nullptr, 10);
      if (held >= size) return;
    }
  };
  for (;;) {
    const double began = now();
    long asked = 0;
    for (; static_cast<double>(asked) / per_second < seconds; ++asked) {
      sleep_until(began + static_cast<double>(asked) / per_second);
      if (asked > 0) read_answer();
      if (send(connection, request, length, 0) != static_cast<ssize_t>(length))
        fail("prober", "the server has left");
    }
    if (asked > 0) read_answer();
    std::printf("%.6f %.6f %ld\n", began, now(), asked);
    std::fflush(stdout);
    sleep_until(now() + seconds);
  }
}
