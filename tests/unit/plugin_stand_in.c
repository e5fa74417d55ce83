/* SPDX-License-Identifier: GPL-2.0-only
 * A network plugin of NCCL with the interface VERSION (prototypes as in NCCL's net_vN.h), which sends through files.
 * PLANTED is a fault. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#if VERSION >= 9
typedef size_t size_type;
#else
typedef int size_type;
#endif
#if VERSION >= 11
#define CONTEXT void *context,
#else
#define CONTEXT
#endif
#if VERSION >= 10
#define ALSO(what) , what
#else
#define ALSO(what)
#endif
#if VERSION >= 7
#define OFFLOAD , void **offload
#else
#define OFFLOAD
#endif
typedef struct {
    char *name, *path;
    uint64_t guid;
    int pointers;
#if VERSION >= 8
    int global;
#endif
#if VERSION >= 9
    int flush;
#endif
    int speed, port;
    float latency;
    int comms, receives;
    char more[64];
} properties;
typedef struct { int sends, tries; char path[128]; int number; } connection;
typedef struct { int sends; char path[160]; void *data; size_t size; } request;
typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);

static int planted(const char *fault) { const char *set = getenv("PLANTED"); return set && !strcmp(set, fault); }
#if VERSION >= 11
static int init(void **context, uint64_t id, void *config, logger say, void *profiler)
#elif VERSION == 10
static int init(logger say, void *profiler)
#else
static int init(logger say)
#endif
{
#if VERSION >= 11
    if (id || *(int *) config != -1) return 9;
    *context = "own";
#endif
    if (planted("crash")) abort();
    while (planted("hang")) pause();
    if (planted("no-provider")) {
        say(2, 16, __FILE__, __LINE__, "NET/OFI no provider %s of %d, %lu, %s %s %d", "cxi", 7, 1UL << 40, "a", "b", -5);
        return 2;
    }
    say(3, 16, "init", 1, "NET/OFI Selected provider is %s, fabric is %s (found %d nics)", getenv("PROVIDER"), "x", 2);
    return 0;
}
static int devices(int *count) { *count = planted("no-device") ? 0 : 2; return 0; }
static int get_properties(int number, properties *found)
{
    memset(found, 0, sizeof *found);
    found->name = number ? "cxi1" : "cxi0";
    found->speed = number && planted("slow-link") ? 25000 : 200000;
    return 0;
}
static int listen_(CONTEXT int number, void *handle, void **place)
{
#if VERSION >= 11
    if (strcmp(context, "own")) return 9;
#endif
    snprintf(handle, 128, "%s/%d-%d", getenv("STAND_IN"), (int) getpid(), number);
    *place = strdup(handle);
    return 0;
}
static int open_(int sends, const char *path, void **out)
{
    connection *made = calloc(1, sizeof *made);
    made->sends = sends;
    strcpy(made->path, path);
    *out = made;
    return 0;
}
#if VERSION == 10
static int connect_(int number, void *config, void *handle, void **out OFFLOAD)
#else
static int connect_(CONTEXT int number, void *handle, void **out OFFLOAD)
#endif
{
    static int tries;
    if (planted("no-vni") && number == 1) return 6;
    return ++tries % 3 ? 0 : open_(1, handle, out);
}
static int accept_(void *place, void **out OFFLOAD) { return open_(0, place, out); }
#if VERSION >= 8
static int register_(void *at, void *data, size_t size, int type, void **memory)
#else
static int register_(void *at, void *data, int size, int type, void **memory)
#endif
{ *memory = data; return type == 1 ? 0 : 9; }
static request *ask(connection *at, void *data, size_t size)
{
    request *made = calloc(1, sizeof *made);
    made->sends = at->sends;
    made->data = data;
    made->size = size;
    snprintf(made->path, sizeof made->path, "%s-%d", at->path, at->number++);
    return made;
}
static int send_(void *at, void *data, size_type size, int tag, void *memory ALSO(void *handle), void **out)
{
    char part[170];
    request *made;
    if (memory != data) return 9;
    *out = NULL;
    if (((connection *) at)->tries++ % 2) return 0;
    *out = made = ask(at, data, size);
    snprintf(part, sizeof part, "%s.part", made->path);
    FILE *file = fopen(part, "w");
    if (planted("wrong-values")) memset(data, 9, size);
    fwrite(data, 1, size, file);
    fclose(file);
    return planted("silent") ? 0 : rename(part, made->path);
}
static int receive(void *at, int count, void **data, size_type *sizes, int *tags, void **memory ALSO(void **handles),
                   void **out)
{
    if (count != 1 || memory[0] != data[0] || tags[0] != 1) return 9;
    *out = ask(at, data[0], sizes[0]);
    return 0;
}
static int test(void *asked, int *done, int *size)
{
    request *at = asked;
    FILE *file = at->sends ? NULL : fopen(at->path, "r");
    *done = at->sends || file;
    if (file) {
        *size = fread(at->data, 1, at->size, file);
        fclose(file);
        unlink(at->path);
    }
    return 0;
}
void *NAMED(ncclNetPlugin_v, VERSION)[30] = {
    "stand-in", init, devices, get_properties, listen_, connect_, accept_, register_, NULL, NULL, send_, receive, NULL,
    test};
