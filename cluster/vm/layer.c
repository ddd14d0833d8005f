/* The layer that `cluster vm run` loads into one program of a macOS guest: it raises two answers of the paravirtual
 * Metal device, the highest Apple GPU family and the threadgroup memory, and reports what it did.
 *
 * Public interfaces only: the two functions that hand out devices are interposed, and when the first device appears
 * the two methods are overridden on its own class. Every gate that fails leaves the process as it was, with a reason.
 * Nothing is lowered; Common, Mac and Metal families (Metal3!) stay as they are. Children do not inherit the layer.
 * Reads the variables in `arm`; CLUSTER_VM_REPORT is the path of a file that gets a JSON line per event. */
#include <fcntl.h>
#include <objc/runtime.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#define PRELOAD "DYLD_INSERT_LIBRARIES"
#define OURS(function) layer_##function
#define STOCK(function) function /* dyld does not interpose the library that interposes */
#else /* the test bench: GNU's Objective-C runtime, where the stand-in brings its own sysctl */
#include <dlfcn.h>
#define PRELOAD "LD_PRELOAD"
#define OURS(function) function
#define STOCK(function) ((id(*)(void))dlsym(RTLD_NEXT, #function))
int sysctlbyname(const char *, void *, size_t *, void *, size_t);
#endif
id MTLCreateSystemDefaultDevice(void), MTLCopyAllDevices(void);

/* Call a method without objc_msgSend: it works the same on both runtimes. */
#define ASK(type, object, name) ((type(*)(id, SEL))implementation(object, name))(object, sel_registerName(name))
#define ASK_WITH(type, object, name, value) \
    ((type(*)(id, SEL, long long))implementation(object, name))(object, sel_registerName(name), value)
#define FAMILY "supportsFamily:"
#define MEMORY "maxThreadgroupMemoryLength"
enum { LOWEST_APPLE = 1001, HIGHEST_APPLE = 1999, METAL3 = 5001, LARGEST_MEMORY = 1 << 20 };
typedef bool (*family_method)(id, SEL, long long);
typedef unsigned long long (*memory_method)(id, SEL);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool waiting; /* armed, and no device was seen yet */
static long ceiling;
static unsigned long long memory;
static char report_path[1024];
static family_method stock_family; /* both set before an override can run, and never changed after */
static memory_method stock_memory;

static void report(const char *event, const char *reason) {
    int file = open(report_path, O_WRONLY | O_APPEND);
    if (file >= 0 && dprintf(file, "{\"event\": \"%s\", \"reason\": \"%s\"}\n", event, reason) >= 0) close(file);
    if (*reason) dprintf(STDERR_FILENO, "cluster vm: %s: %s\n", event, reason);
}

static IMP implementation(id object, const char *name) {
    return class_getMethodImplementation(object_getClass(object), sel_registerName(name));
}

static bool raised_family(id self, SEL name, long long family) {
    return (family >= LOWEST_APPLE && family <= ceiling) || stock_family(self, name, family);
}

static unsigned long long raised_memory(id self, SEL name) {
    unsigned long long stock = stock_memory(self, name);
    return stock > memory ? stock : memory;
}

/* Whether the method's type encoding is this one, once its numbers (offsets) are left out. */
static bool has_type(Method method, const char *expected) {
    const char *types = method_getTypeEncoding(method);
    for (; types && *types; types++)
        if (!strchr("0123456789", *types) && *types != *expected++) return false;
    return types && !*expected;
}

/* Override on this class only: an inherited method must not change in its base class, for every device. */
static void override(Class class, Method method, IMP implementation) {
    if (!class_addMethod(class, method_getName(method), implementation, method_getTypeEncoding(method)))
        method_setImplementation(class_getInstanceMethod(class, method_getName(method)), implementation);
}

/* Raise the two answers of this device's class, or return why they stay as they are. */
static const char *install(id device) {
    id name = ASK(id, device, "name");
    const char *text = name ? ASK(const char *, name, "UTF8String") : NULL;
    if (!text || !strstr(text, "Paravirtual")) return "the Metal device is not paravirtual";
    Class class = object_getClass(device);
    Method family = class_getInstanceMethod(class, sel_registerName(FAMILY));
    Method bytes = class_getInstanceMethod(class, sel_registerName(MEMORY));
    if (!family || !bytes) return "the Metal device lacks a method";
    if (!(has_type(family, "B@:q") || has_type(family, "c@:q")) || !has_type(bytes, "Q@:"))
        return "a method of the Metal device has another type than expected";

    unsigned long long stock = ASK(unsigned long long, device, MEMORY);
    bool metal3 = ASK_WITH(bool, device, FAMILY, METAL3);
    if (ASK_WITH(bool, device, FAMILY, ceiling) && stock >= memory) return "the stock answers are already enough";
    if (memory < stock) memory = stock;
    stock_family = (family_method)method_getImplementation(family);
    stock_memory = (memory_method)method_getImplementation(bytes);
    override(class, family, (IMP)raised_family);
    override(class, bytes, (IMP)raised_memory);
    if (ASK_WITH(bool, device, FAMILY, ceiling) && ASK_WITH(bool, device, FAMILY, METAL3) == metal3 &&
        ASK(unsigned long long, device, MEMORY) == memory) return NULL;
    override(class, family, (IMP)stock_family);
    override(class, bytes, (IMP)stock_memory);
    return "the answers after the change were not as meant; both methods are restored";
}

static void consider(id device) {
    char answers[80];
    pthread_mutex_lock(&lock); /* whoever comes second gets its device only when the answers are settled */
    if (waiting && device) {
        waiting = false;
        const char *reason = install(device);
        snprintf(answers, sizeof answers, "Apple family %ld, threadgroup memory %llu", ceiling, memory);
        report(reason ? "stays stock" : "installed", reason ? reason : answers);
    }
    pthread_mutex_unlock(&lock);
}

/* The whole text as a number within [least, most], or -1. */
static long number(const char *text, long least, long most) {
    char *end = NULL;
    long value = text && *text >= '0' && *text <= '9' ? strtol(text, &end, 10) : -1;
    return end && !*end && value >= least && value <= most ? value : -1;
}

__attribute__((constructor)) static void arm(void) {
    const char *ours[] = {PRELOAD, "CLUSTER_VM_FAMILY", "CLUSTER_VM_THREADGROUP_MEMORY", "CLUSTER_VM_REPORT"};
    const char *path = getenv(ours[3]), *reason = "";
    long bytes = number(getenv(ours[2]), 0, LARGEST_MEMORY);
    int guest = 0;
    size_t size = sizeof guest;
    ceiling = number(getenv(ours[1]), LOWEST_APPLE, HIGHEST_APPLE);
    memory = (unsigned long long)bytes;
    snprintf(report_path, sizeof report_path, "%s", path ? path : "");
    for (int i = 0; i < 4; i++) unsetenv(ours[i]); /* one process only */
    if (ceiling < 0) reason = "CLUSTER_VM_FAMILY is not a number from 1001 to 1999";
    else if (bytes < 0) reason = "CLUSTER_VM_THREADGROUP_MEMORY is not a number of bytes up to 1048576";
    else if (sysctlbyname("kern.hv_vmm_present", &guest, &size, NULL, 0) || guest != 1)
        reason = "this is not a virtual machine";
    waiting = !*reason;
    report(waiting ? "armed" : "stays stock", reason);
}

id OURS(MTLCreateSystemDefaultDevice)(void) {
    id device = STOCK(MTLCreateSystemDefaultDevice)();
    consider(device);
    return device;
}

id OURS(MTLCopyAllDevices)(void) {
    id devices = STOCK(MTLCopyAllDevices)();
    if (devices && ASK(unsigned long, devices, "count")) consider(ASK_WITH(id, devices, "objectAtIndex:", 0));
    return devices;
}

#ifdef __APPLE__
__attribute__((used, section("__DATA,__interpose"))) static const void *const replaced[] = {
    (const void *)OURS(MTLCreateSystemDefaultDevice), (const void *)MTLCreateSystemDefaultDevice,
    (const void *)OURS(MTLCopyAllDevices), (const void *)MTLCopyAllDevices};
#endif
