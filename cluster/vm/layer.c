/* The layer that `cluster vm run` loads into one program of a macOS guest: it raises two answers of the paravirtual
 * Metal device, the highest Apple GPU family and the threadgroup memory, and reports what it did.
 *
 * Public interfaces only: the two functions that hand out devices are interposed, and when the first device appears
 * the two methods are overridden on its own class. Every gate that fails leaves the process as it was, with a reason.
 * Nothing is lowered; Common, Mac and Metal families (Metal3!) stay as they are. Children do not inherit the layer.
 * CLUSTER_VM_FAMILY (1001..1999), CLUSTER_VM_THREADGROUP_MEMORY (bytes), CLUSTER_VM_REPORT (a path: a JSON line per
 * event: "armed", "installed", or "refused" with a reason). */
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
#else /* the test bench: GNU's Objective-C runtime, where the stand-in brings its own sysctl */
#include <dlfcn.h>
#define PRELOAD "LD_PRELOAD"
int sysctlbyname(const char *, void *, size_t *, void *, size_t);
#endif

typedef bool (*family_method)(id, SEL, long long);
typedef unsigned long long (*memory_method)(id, SEL);
enum { LOWEST_APPLE = 1001, BEYOND_APPLE = 2000, LARGEST_MEMORY = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool waiting; /* armed, and no device was seen yet */
static long ceiling;
static unsigned long long memory;
static char report_path[1024];
static family_method stock_family; /* both set before an override can run, and never changed after */
static memory_method stock_memory;

/* Call a method without objc_msgSend: it works the same on both runtimes. */
#define ASK(type, object, name) ((type(*)(id, SEL))implementation(object, name))(object, sel_registerName(name))
#define ASK_WITH(type, object, name, value) \
    ((type(*)(id, SEL, long long))implementation(object, name))(object, sel_registerName(name), value)
#define FAMILY "supportsFamily:"
#define MEMORY "maxThreadgroupMemoryLength"

static IMP implementation(id object, const char *name) {
    return class_getMethodImplementation(object_getClass(object), sel_registerName(name));
}

static void report(const char *event, const char *reason, long family, unsigned long long bytes) {
    const char *form = "{\"event\": \"%s\", \"reason\": \"%s\", \"family\": %ld, \"threadgroup_memory\": %llu}\n";
    int file = open(report_path, O_WRONLY | O_APPEND);
    if (file >= 0 && dprintf(file, form, event, reason, family, bytes) >= 0) close(file);
    if (*reason) dprintf(STDERR_FILENO, "cluster vm: stays stock: %s\n", reason);
    else if (family) dprintf(STDERR_FILENO, "cluster vm: Apple family %ld, threadgroup memory %llu\n", family, bytes);
}

static bool raised_family(id self, SEL name, long long family) {
    return (family >= LOWEST_APPLE && family <= ceiling) || stock_family(self, name, family);
}

static unsigned long long raised_memory(id self, SEL name) {
    unsigned long long stock = stock_memory(self, name);
    return stock > memory ? stock : memory;
}

static bool is_paravirtual(id device) {
    bool named = class_getInstanceMethod(object_getClass(device), sel_registerName("name"));
    id name = named ? ASK(id, device, "name") : NULL;
    const char *text = name ? ASK(const char *, name, "UTF8String") : NULL;
    return text && strstr(text, "Paravirtual");
}

/* Override on this class only: an inherited method must not change in its base class, for every device. */
static void override(Class class, Method method, IMP implementation) {
    if (!class_addMethod(class, method_getName(method), implementation, method_getTypeEncoding(method)))
        method_setImplementation(class_getInstanceMethod(class, method_getName(method)), implementation);
}

static const char *install(id device) {
    static const long long untouched[] = {2001, 2002, 3001, 3002, 3003, 4001, 4002, 5001, 5002};
    enum { COUNT = sizeof untouched / sizeof *untouched };
    Class class = object_getClass(device);
    if (!is_paravirtual(device)) return "the Metal device is not paravirtual";
    Method family = class_getInstanceMethod(class, sel_registerName(FAMILY));
    Method bytes = class_getInstanceMethod(class, sel_registerName(MEMORY));
    if (!family || !bytes) return "the Metal device lacks a method";
    const char *returns = method_getTypeEncoding(family), *size = method_getTypeEncoding(bytes);
    char argument[16] = "";
    if (method_getNumberOfArguments(family) == 3) method_getArgumentType(family, 2, argument, sizeof argument);
    bool known = returns && *returns && strchr("Bc", *returns) && *argument == 'q'; /* BOOL, NSInteger */
    if (!known || !size || *size != 'Q' || method_getNumberOfArguments(bytes) != 2)
        return "a method of the Metal device has another type than expected";

    bool before[COUNT];
    for (int i = 0; i < COUNT; i++) before[i] = ASK_WITH(bool, device, FAMILY, untouched[i]);
    unsigned long long stock = ASK(unsigned long long, device, MEMORY), wanted = memory > stock ? memory : stock;
    if (ASK_WITH(bool, device, FAMILY, ceiling) && stock >= wanted) return "the stock answers are already enough";

    stock_family = (family_method)method_getImplementation(family);
    stock_memory = (memory_method)method_getImplementation(bytes);
    override(class, family, (IMP)raised_family);
    override(class, bytes, (IMP)raised_memory);
    bool as_meant = ASK(unsigned long long, device, MEMORY) == wanted && ASK_WITH(bool, device, FAMILY, ceiling);
    for (int i = 0; i < COUNT; i++) as_meant = as_meant && ASK_WITH(bool, device, FAMILY, untouched[i]) == before[i];
    if (as_meant) return NULL;
    override(class, family, (IMP)stock_family);
    override(class, bytes, (IMP)stock_memory);
    return "the answers after the change were not as meant; both methods are restored";
}

static void consider(id device) {
    pthread_mutex_lock(&lock); /* whoever comes second gets its device only when the answers are settled */
    if (waiting && device) {
        waiting = false;
        const char *reason = install(device);
        if (reason) report("refused", reason, 0, 0);
        else report("installed", "", ceiling, ASK(unsigned long long, device, MEMORY));
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
    int guest = 0;
    size_t size = sizeof guest;
    long bytes = number(getenv("CLUSTER_VM_THREADGROUP_MEMORY"), 0, LARGEST_MEMORY);
    const char *path = getenv("CLUSTER_VM_REPORT"), *reason = NULL;
    snprintf(report_path, sizeof report_path, "%s", path ? path : "");
    ceiling = number(getenv("CLUSTER_VM_FAMILY"), LOWEST_APPLE, BEYOND_APPLE - 1);
    memory = bytes < 0 ? 0 : (unsigned long long)bytes;
    const char *ours[] = {PRELOAD, "CLUSTER_VM_FAMILY", "CLUSTER_VM_THREADGROUP_MEMORY", "CLUSTER_VM_REPORT"};
    for (int i = 0; i < 4; i++) unsetenv(ours[i]); /* one process only */
    if (ceiling < 0) reason = "CLUSTER_VM_FAMILY is not a number from 1001 to 1999";
    else if (bytes < 0) reason = "CLUSTER_VM_THREADGROUP_MEMORY is not a number of bytes up to 1048576";
    else if (sysctlbyname("kern.hv_vmm_present", &guest, &size, NULL, 0) || guest != 1)
        reason = "this is not a virtual machine";
    waiting = !reason;
    report(reason ? "refused" : "armed", reason ? reason : "", 0, 0);
}

#ifdef __APPLE__
extern id MTLCreateSystemDefaultDevice(void);
extern id MTLCopyAllDevices(void);
#define STOCK(function) function /* dyld does not interpose the library that interposes */
#define OURS(function) layer_##function
#define INTERPOSE(function)                                                                                        \
    __attribute__((used, section("__DATA,__interpose"))) static const struct { const void *ours, *stock; }         \
        interpose_##function = {(const void *)OURS(function), (const void *)function};
#else
#define STOCK(function) ((id(*)(void))dlsym(RTLD_NEXT, #function))
#define OURS(function) function
#define INTERPOSE(function)
#endif

id OURS(MTLCreateSystemDefaultDevice)(void) {
    id device = STOCK(MTLCreateSystemDefaultDevice)();
    consider(device);
    return device;
}
INTERPOSE(MTLCreateSystemDefaultDevice)

id OURS(MTLCopyAllDevices)(void) {
    id devices = STOCK(MTLCopyAllDevices)();
    if (devices && ASK(unsigned long, devices, "count")) consider(ASK_WITH(id, devices, "objectAtIndex:", 0));
    return devices;
}
INTERPOSE(MTLCopyAllDevices)
