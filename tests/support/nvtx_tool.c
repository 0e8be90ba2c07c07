/* A profiler as NVTX sees one: writes every range of every domain to the file NVTX_TOOL_LOG.
 *
 * Loaded by NVTX itself where NVTX_INJECTION64_PATH names it. The layouts are those of NVTX 3
 * (nvToolsExt.h and nvtxDetail/nvtxTypes.h), written out here so that no header is needed.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct event {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    union { uint64_t u; int64_t i; } payload;
    int32_t message_type;
    const char *message; /* text, or what register_string returned */
};

struct callbacks {
    size_t struct_size;
    int (*get_table)(uint32_t module, void ****table, uint32_t *size);
};

enum { ETID_CALLBACKS = 1, MODULE_CORE2 = 5 };
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };

static FILE *out;

static void *create_domain(const char *name) { return strdup(name); }

static void *register_string(void *domain, const char *text) { return strdup(text); }

static void name_category(void *domain, uint32_t category, const char *name) {
    fprintf(out, "category %s %u %s\n", (char *)domain, category, name);
}

static int push(void *domain, const struct event *e) {
    fprintf(out, "push %ld %s %s %u %lld\n", (long)syscall(SYS_gettid), (char *)domain,
            e->message_type ? e->message : "-", e->category,
            e->payload_type ? (long long)e->payload.i : -1LL);
    return 0;
}

static int pop(void *domain) {
    fprintf(out, "pop %ld %s\n", (long)syscall(SYS_gettid), (char *)domain);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const char *path = getenv("NVTX_TOOL_LOG");
    const struct callbacks *callbacks = get_export_table(ETID_CALLBACKS);
    void ***table;
    uint32_t size;
    if (!path || !callbacks || !callbacks->get_table(MODULE_CORE2, &table, &size)) return 0;
    if (size <= CREATE_DOMAIN || !(out = fopen(path, "a"))) return 0;
    setvbuf(out, NULL, _IOLBF, 0);
    *table[PUSH] = push;
    *table[POP] = pop;
    *table[NAME_CATEGORY] = name_category;
    *table[REGISTER_STRING] = register_string;
    *table[CREATE_DOMAIN] = create_domain;
    return 1;
}
