// Makes system calls fail, as a dying disk or a full server does. Loaded by LD_PRELOAD into one process.
//   FAIL_CALLS  names of calls, each with how many of them work before: ",renameat2:0,rename:2,"
//   FAIL_PATH   only on files whose path has this in it
//   FAIL_AT_END only on files whose path ends in this
//   FAIL_ERRNO  what they fail with; 0: they do nothing and say so, as of 0 bytes
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int renames;

static int fails(const char *call, int fd, const char *path) {
    char name[64], link[64], target[4096] = "";
    const char *names = getenv("FAIL_CALLS"), *part = getenv("FAIL_PATH");
    snprintf(name, sizeof name, ",%s:", call);
    const char *entry = names ? strstr(names, name) : NULL;
    if (!entry) return 0;
    int working = atoi(entry + strlen(name));
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, target, sizeof target - 1);
        if (length > 0) target[length] = 0;
        path = target;
    }
    if (part && !strstr(path, part)) return 0;
    const char *end = getenv("FAIL_AT_END");
    if (end && (strlen(path) < strlen(end) || strcmp(path + strlen(path) - strlen(end), end))) return 0;
    if (working && __sync_fetch_and_add(&renames, 1) < working) return 0;
    errno = atoi(getenv("FAIL_ERRNO"));
    return 1;
}

static int result(void) { return errno ? -1 : 0; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pread64(int fd, void *data, size_t n, off64_t at) {
    return fails("pread64", fd, NULL) ? result() : REAL(pread64)(fd, data, n, at);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    return fails("preadv64", fd, NULL) ? result() : REAL(preadv64v2)(fd, parts, count, at, flags);
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    return fails("preadv64", fd, NULL) ? result() : REAL(preadv64)(fd, parts, count, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    return fails("pwrite64", fd, NULL) ? result() : REAL(pwrite64)(fd, data, n, at);
}
int fallocate64(int fd, int mode, off64_t at, off64_t n) {
    return fails("fallocate64", fd, NULL) ? -1 : REAL(fallocate64)(fd, mode, at, n);
}
int fsync(int fd) { return fails("fsync", fd, NULL) ? -1 : REAL(fsync)(fd); }
int rename(const char *from, const char *to) {
    return fails("rename", -1, from) ? -1 : REAL(rename)(from, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return fails("renameat2", -1, from) ? -1 : REAL(renameat2)(a, from, b, to, flags);
}
int unlinkat(int directory, const char *name, int flags) {
    return fails("unlinkat", directory, NULL) ? -1 : REAL(unlinkat)(directory, name, flags);
}
int stat64(const char *path, struct stat64 *status) {
    return fails("stat64", -1, path) ? -1 : REAL(stat64)(path, status);
}
